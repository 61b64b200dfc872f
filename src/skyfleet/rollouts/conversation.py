"""The agent's side of an episode: message history, token transcripts and the engine that extends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from skyfleet.chat.message import Message, Text, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Completion, Finish, Transcript
from skyfleet.engines.engine import ChatModel, CutShortError, Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.context_env import manage_context, n_turns
from skyfleet.envs.env import Observation
from skyfleet.errors import EngineError
from skyfleet.tasks.task import Task

CUT = "the agent's history was cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Observation):
    """An opening and, behind it, turns that were played before."""

    begins: tuple[int, ...]
    """Where in `messages` each turn begins that is still in view."""
    n_turns: int
    """All that were played, in view or not."""


class History:
    def __init__(self, opening: Observation) -> None:
        self.messages: list[Message] = list(opening.messages)
        self.n_turns = 0
        # Not told by their role: an env may speak as the assistant too.
        self._begins: list[int] = []
        if isinstance(opening, Resumed):
            self.n_turns, self._begins = opening.n_turns, list(opening.begins)

    def say(self, message: Message) -> None:
        """Begin a turn."""
        self._begins.append(len(self.messages))
        self.n_turns += 1
        self.messages.append(message)

    def cut(self, *, keep_recent_turns: int) -> bool:
        """Leave the opening, the turn just spoken and so many before it; False: that is all."""
        kept = self._begins[-1 - keep_recent_turns :]
        if len(kept) == len(self._begins):
            return False
        first = self._begins[0]
        del self.messages[first : kept[0]]
        self._begins = [at - kept[0] + first for at in kept]
        return True

    def begun(self, opening: Observation) -> History:
        """Another, with nothing of this one but how many turns there were."""
        history = History(opening)
        history.n_turns += self.n_turns
        return history

    def resumed(self, tools: Sequence[ToolSpec]) -> Resumed:
        return Resumed(
            messages=tuple(self.messages),
            tools=tuple(tools),
            begins=tuple(self._begins),
            n_turns=self.n_turns,
        )


_CUTTING = manage_context.__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextStatus:
    max_input_length: int
    max_turns: int
    warning_threshold: float
    """Share of `max_input_length`; from there on the line is a warning."""

    def told(
        self,
        messages: Sequence[Message],
        *,
        used_tokens: int,
        turns: int,
        tools: Sequence[ToolSpec],
    ) -> tuple[Message, ...]:
        """`messages`, the last of them with the line, after so many `turns`."""
        can_cut = any(tool.name == _CUTTING for tool in tools)
        advice = f"finish soon{f', or make room with {_CUTTING}' if can_cut else ''}"
        line = self._line(used_tokens, turns, advice)
        if not messages:
            return (Message(role="user", content=line),)
        *before, last = messages
        content = last.content
        if isinstance(content, str):
            return (*before, replace(last, content=f"{content}\n{line}"))
        return (*before, replace(last, content=(*content, Text(f"\n{line}"))))

    def _line(self, used_tokens: int, turns: int, advice: str) -> str:
        share = used_tokens / self.max_input_length
        warns = share >= self.warning_threshold
        return (
            f"[Context{' warning' if warns else ''}: {used_tokens:,} of {self.max_input_length:,} "
            f"tokens used ({share:.0%}), {n_turns(self.max_turns - turns)} left"
            f"{f'; {advice}' if warns else ''}]"
        )


REWRITTEN = "the chat template writes the past anew"
BEGUN = "the environment began another conversation"


class Conversation(Protocol):
    finish: Finish

    def observe(self, messages: Sequence[Message]) -> None: ...

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        """What is heard next follows the opening, the last turn and so many turns before it."""
        ...

    def restart(self, opening: Observation) -> None:
        """What is spoken next follows `opening` and nothing before it."""
        ...

    async def generate(self) -> Message: ...

    async def close(self) -> None: ...

    @property
    def prompt_length(self) -> int: ...

    @property
    def transcripts(self) -> tuple[Transcript, ...]: ...


AgentFactory = Callable[[Task, Observation, str], Conversation]
"""Starts a conversation for one episode of a task; the string names its session."""


class TokenConversation:
    """Speaks through an Engine and keeps every token it saw."""

    def __init__(
        self,
        opening: Observation,
        *,
        engine: Engine,
        renderer: Renderer,
        sampling: SamplingParams,
        session: str,
        status: ContextStatus | None = None,
    ) -> None:
        self._engine, self._renderer = engine, renderer
        self._sampling, self._session = sampling, session
        self._history, self._tools = History(opening), opening.tools
        self._status, self._is_cut = status, False
        self._transcripts = [Transcript()]
        self._transcripts[0].append_prompt(renderer.open(opening.messages, opening.tools))
        self.finish: Finish = "stop"

    @property
    def transcripts(self) -> tuple[Transcript, ...]:
        return tuple(self._transcripts)

    @property
    def prompt_length(self) -> int:
        return len(self._transcripts[-1])

    async def generate(self) -> Message:
        transcript = self._transcripts[-1]
        completion = await self._complete(transcript.token_ids)
        if completion.finish == "abort":
            # Half a message is nobody's action.
            raise EngineError(f"the turn was broken off after {len(completion.token_ids)} tokens")
        transcript.say(completion)
        self.finish = completion.finish
        message = self._renderer.parse(completion.token_ids, self._tools)
        self._history.say(message)
        return message

    def observe(self, messages: Sequence[Message]) -> None:
        if self._status is not None:
            messages = self._told(messages, self._status)
        token_ids, reason = self._next(messages)
        self._history.messages.extend(messages)
        self._is_cut = False
        if reason:
            self._transcripts.append(Transcript(reason=reason))
        self._transcripts[-1].append_prompt(token_ids)

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        self._is_cut = self._history.cut(keep_recent_turns=keep_recent_turns)

    def restart(self, opening: Observation) -> None:
        self._history, self._tools = self._history.begun(opening), opening.tools
        self._is_cut = False
        self._transcripts.append(Transcript(reason=BEGUN))
        self._transcripts[-1].append_prompt(self._renderer.open(opening.messages, opening.tools))

    async def close(self) -> None:
        await self._engine.release(self._session)

    async def _complete(self, token_ids: Sequence[int]) -> Completion:
        return await self._engine.generate(token_ids, self._sampling, session=self._session)

    def _next(self, messages: Sequence[Message]) -> tuple[list[int], str]:
        """What the engine is given next: more of the transcript, or, for a reason, all of another."""
        if not self._is_cut:
            joined = self._renderer.join(self._transcripts[-1].token_ids[-1], messages)
            if joined is not None:
                return joined, ""
        whole = self._renderer.open([*self._history.messages, *messages], self._tools)
        return whole, CUT if self._is_cut else REWRITTEN

    def _told(self, messages: Sequence[Message], status: ContextStatus) -> tuple[Message, ...]:
        token_ids, reason = self._next(messages)
        return status.told(
            messages,
            used_tokens=len(token_ids) + (0 if reason else self.prompt_length),
            turns=self._history.n_turns,
            tools=self._tools,
        )


class MessageConversation:
    """Speaks through a ChatModel: teachers and baselines, no tokens to train on."""

    def __init__(self, opening: Observation, *, model: ChatModel, sampling: SamplingParams) -> None:
        self._model, self._sampling = model, sampling
        self._history, self._tools = History(opening), opening.tools
        self.finish: Finish = "stop"

    @property
    def transcripts(self) -> tuple[Transcript, ...]:
        return ()

    @property
    def prompt_length(self) -> int:
        return 0

    async def generate(self) -> Message:
        try:
            message = await self._model.reply(self._history.messages, self._tools, self._sampling)
        except CutShortError as error:
            message, self.finish = error.message, "length"
        self._history.say(message)
        return message

    def observe(self, messages: Sequence[Message]) -> None:
        self._history.messages.extend(messages)

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        self._history.cut(keep_recent_turns=keep_recent_turns)

    def restart(self, opening: Observation) -> None:
        self._history, self._tools = self._history.begun(opening), opening.tools

    async def close(self) -> None: ...
