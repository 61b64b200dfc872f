"""Chat engines: messages and tools in, one message with its tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Completion
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import ContextFullError, EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletion:
    """One turn, as a message and as the exact tokens."""

    message: Message
    prompt_token_ids: tuple[int, ...]
    """The rendered messages and tools."""
    completion: Completion


class ChatEngine(Protocol):
    policy_version: int

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> ChatCompletion:
        """Generate the next assistant message. A session keeps its cache until it is released."""
        ...

    async def release(self, session: str) -> None: ...


class TrainedChat:
    """The chat endpoint of a server whose weights are trained: its version is that of `engine`."""

    def __init__(self, chat: ChatEngine, engine: Engine) -> None:
        self._chat, self._engine = chat, engine

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._engine.policy_version = version

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> ChatCompletion:
        self._chat.policy_version = self._engine.policy_version
        return await self._chat.chat(messages, tools, sampling, session=session)

    async def release(self, session: str) -> None:
        await self._engine.release(session)


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    """A session up to its last turn, as messages and as tokens."""

    messages: list[Message]
    tools: Sequence[ToolSpec]
    token_ids: list[int]


class RenderedChat:
    """Any Engine as a ChatEngine: it renders prompts and parses completions in this process."""

    def __init__(self, engine: Engine, renderer: Renderer, *, max_input_length: int) -> None:
        """A prompt of more than `max_input_length` tokens raises ContextFullError."""
        self._engine, self._renderer = engine, renderer
        self._max_input_length = max_input_length
        self._histories: dict[str, _History] = {}

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._engine.policy_version = version

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> ChatCompletion:
        """Adds the stop tokens of the renderer to `sampling`."""
        prompt = self._render(messages, tools, session)
        if len(prompt) > self._max_input_length:
            raise ContextFullError(
                f"session {session}: the prompt has {len(prompt)} tokens, more than "
                f"generator.max_input_length={self._max_input_length}"
            )
        stop_token_ids = dict.fromkeys((*sampling.stop_token_ids, *self._renderer.stop_token_ids))
        completion = await self._engine.generate(
            prompt, replace(sampling, stop_token_ids=tuple(stop_token_ids)), session=session
        )
        if completion.finish == "abort":
            raise EngineError(f"session {session}: the engine aborted the turn")
        message = self._renderer.parse(completion.token_ids, tools)
        self._histories[session] = _History(
            messages=[*messages, message],
            tools=tools,
            token_ids=[*prompt, *completion.token_ids],
        )
        return ChatCompletion(
            message=message, prompt_token_ids=tuple(prompt), completion=completion
        )

    async def release(self, session: str) -> None:
        self._histories.pop(session, None)
        await self._engine.release(session)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], session: str
    ) -> list[int]:
        """Continue from the sampled tokens if the history is unchanged.

        Otherwise render all messages.
        """
        history = self._histories.get(session)
        if history is not None:
            n, token_ids = len(history.messages), history.token_ids
            if list(messages[:n]) == history.messages and tools == history.tools:
                joined = self._renderer.render_continuation(token_ids[-1], messages[n:])
                if joined is not None:
                    return [*token_ids, *joined]
        return self._renderer.render_prompt(messages, tools)
