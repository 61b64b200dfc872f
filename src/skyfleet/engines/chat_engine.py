"""Chat-level engines: messages and tools in, one message with its tokens out."""

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
    """One turn, in words and in the very tokens."""

    message: Message
    prompt_token_ids: tuple[int, ...]
    """What the messages and tools became."""
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
        """The assistant's next message. A session keeps its cache until it is released."""
        ...

    async def release(self, session: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """A session up to its last turn, in words and in tokens."""

    messages: list[Message]
    tools: Sequence[ToolSpec]
    token_ids: list[int]


class RenderedChat:
    def __init__(self, engine: Engine, renderer: Renderer, *, max_input_length: int) -> None:
        """`max_input_length` in tokens: a longer prompt is a ContextFullError."""
        self._engine, self._renderer = engine, renderer
        self._max_input_length = max_input_length
        self._told: dict[str, _Told] = {}

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
        """The model's own ends of a turn are added to `sampling`."""
        prompt = self._prompt(messages, tools, session)
        if len(prompt) > self._max_input_length:
            raise ContextFullError(
                f"session {session}: the prompt has {len(prompt)} tokens, "
                f"generator.max_input_length={self._max_input_length}"
            )
        ends = dict.fromkeys((*sampling.stop_token_ids, *self._renderer.stop_token_ids))
        completion = await self._engine.generate(
            prompt, replace(sampling, stop_token_ids=tuple(ends)), session=session
        )
        if completion.finish == "abort":
            raise EngineError(f"session {session}: the engine broke the turn off")
        message = self._renderer.parse(completion.token_ids, tools)
        self._told[session] = _Told(
            messages=[*messages, message],
            tools=tools,
            token_ids=[*prompt, *completion.token_ids],
        )
        return ChatCompletion(
            message=message, prompt_token_ids=tuple(prompt), completion=completion
        )

    async def release(self, session: str) -> None:
        self._told.pop(session, None)
        await self._engine.release(session)

    def _prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], session: str
    ) -> list[int]:
        """Goes on from the tokens that were sampled wherever the past is as it was told."""
        told = self._told.get(session)
        if told is not None:
            n, so_far = len(told.messages), told.token_ids
            if list(messages[:n]) == told.messages and tools == told.tools:
                joined = self._renderer.join(so_far[-1], messages[n:])
                if joined is not None:
                    return [*so_far, *joined]
        return self._renderer.open(messages, tools)
