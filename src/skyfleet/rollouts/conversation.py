"""The agent's side of an episode: message history, token transcripts and the engine that extends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from skyfleet.chat.message import Message, Text, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Completion, Finish, Transcript
from skyfleet.engines.engine import ChatModel, Engine, ReplyTruncatedError
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.context_env import format_turns, manage_context
from skyfleet.envs.env import Observation
from skyfleet.errors import EngineError
from skyfleet.rollouts.rendering import exceeds
from skyfleet.tasks.task import Task

HISTORY_CUT = "the agent's history was cut"
REWRITTEN = "the chat template rewrites earlier turns"
RESTARTED = "the environment restarted the conversation"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedObservation(Observation):
    """A prompt followed by turns of an earlier episode, from which another agent continues."""

    turn_starts: tuple[int, ...]
    """The index in `messages` of each turn that is still in view."""
    n_turns: int
    """The number of earlier turns, in view or not."""
    prompt_token_ids: tuple[int, ...] | None = None
    """The exact tokens of `messages`; None: the renderer writes them."""


class History:
    """The messages an agent sees, with the start of each of its turns."""

    def __init__(self, prompt: Observation) -> None:
        self.messages: list[Message] = list(prompt.messages)
        self.n_turns = 0
        # Not derived from roles: an environment may send assistant messages too.
        self._turn_starts: list[int] = []
        if isinstance(prompt, ResumedObservation):
            self.n_turns, self._turn_starts = prompt.n_turns, list(prompt.turn_starts)

    def add_turn(self, action: Message) -> None:
        """Start a turn with the agent's message."""
        self._turn_starts.append(len(self.messages))
        self.n_turns += 1
        self.messages.append(action)

    def cut(self, *, keep_recent_turns: int) -> bool:
        """Keep the prompt, the current turn and so many before it; False if nothing was removed."""
        kept = self._turn_starts[-1 - keep_recent_turns :]
        if len(kept) == len(self._turn_starts):
            return False
        first = self._turn_starts[0]
        del self.messages[first : kept[0]]
        self._turn_starts = [at - kept[0] + first for at in kept]
        return True

    def restart(self, prompt: Observation) -> History:
        """Return a history of `prompt` alone that still counts the earlier turns."""
        history = History(prompt)
        history.n_turns += self.n_turns
        return history

    def resume(
        self, tools: Sequence[ToolSpec], *, prompt_token_ids: Sequence[int] | None = None
    ) -> ResumedObservation:
        """Return an observation from which another conversation continues this one."""
        return ResumedObservation(
            messages=tuple(self.messages),
            tools=tuple(tools),
            turn_starts=tuple(self._turn_starts),
            n_turns=self.n_turns,
            prompt_token_ids=None if prompt_token_ids is None else tuple(prompt_token_ids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextStatus:
    """A line in every observation that says how much of the context is used."""

    max_input_length: int
    max_turns: int
    warning_threshold: float
    """Share of `max_input_length` from which on the line is a warning."""

    def annotate(
        self,
        messages: Sequence[Message],
        *,
        used_tokens: int,
        turns: int,
        tools: Sequence[ToolSpec],
    ) -> tuple[Message, ...]:
        """Append the line to the last message, after so many `turns`."""
        can_cut = any(tool.name == manage_context.__name__ for tool in tools)
        make_room = f", or make room with {manage_context.__name__}" if can_cut else ""
        line = self._format(used_tokens, turns, f"finish soon{make_room}")
        if not messages:
            return (Message(role="user", content=line),)
        *before, last = messages
        content = last.content
        if isinstance(content, str):
            return (*before, replace(last, content=f"{content}\n{line}"))
        return (*before, replace(last, content=(*content, Text(f"\n{line}"))))

    def _format(self, used_tokens: int, turns: int, advice: str) -> str:
        share = used_tokens / self.max_input_length
        warns = share >= self.warning_threshold
        return (
            f"[Context{' warning' if warns else ''}: {used_tokens:,} of {self.max_input_length:,} "
            f"tokens used ({share:.0%}), {format_turns(self.max_turns - turns)} left"
            f"{f'; {advice}' if warns else ''}]"
        )


class Conversation(Protocol):
    finish: Finish
    """Why the last completion ended."""

    def observe(self, messages: Sequence[Message]) -> None:
        """Append the environment's messages."""
        ...

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        """Keep only the prompt, the last turn and so many turns before it."""
        ...

    def restart(self, observation: Observation) -> None:
        """Continue from `observation` alone."""
        ...

    async def generate(self) -> Message:
        """Sample the agent's next message."""
        ...

    async def close(self) -> None: ...

    @property
    def prompt_length(self) -> int:
        """Tokens of the next prompt, as far as they are known before sampling."""
        ...

    @property
    def transcripts(self) -> tuple[Transcript, ...]: ...


AgentFactory = Callable[[Task, Observation, str], Conversation]
"""Starts a conversation for one episode of a task; the string is its session id."""


class TokenConversation:
    """Samples tokens from an Engine and records every token of the episode."""

    def __init__(
        self,
        observation: Observation,
        *,
        engine: Engine,
        renderer: Renderer,
        sampling: SamplingParams,
        session: str,
        status: ContextStatus | None = None,
        max_input_length: int | None = None,
    ) -> None:
        """Long messages that exceed `max_input_length` tokens by themselves are not rendered."""
        self._engine, self._renderer = engine, renderer
        self._sampling, self._session = sampling, session
        self._max_input_length, self._is_full = max_input_length, False
        self._history, self._tools = History(observation), observation.tools
        self._status, self._is_cut = status, False
        self._transcripts: list[Transcript] = []
        self._start_transcript(observation, reason="")
        self.finish: Finish = "stop"

    @property
    def transcripts(self) -> tuple[Transcript, ...]:
        return tuple(self._transcripts)

    @property
    def prompt_length(self) -> int:
        if self._is_full and self._max_input_length is not None:
            return self._max_input_length + 1
        return len(self._transcripts[-1])

    async def generate(self) -> Message:
        transcript = self._transcripts[-1]
        # A list: engines index the prompt many times, and the view is slower.
        completion = await self._complete(transcript.token_ids[:])
        if completion.finish == "abort":
            # A partial message is not an action of the policy.
            raise EngineError(
                f"the engine aborted the turn after {len(completion.token_ids)} tokens"
            )
        transcript.append_completion(completion)
        self.finish = completion.finish
        message = self._renderer.parse(completion.token_ids, self._tools)
        self._history.add_turn(message)
        return message

    def observe(self, messages: Sequence[Message]) -> None:
        if self._exceeds_context(messages):
            self._is_full = True
            return
        if self._status is not None:
            messages = self._annotate(messages, self._status)
        token_ids, reason = self._render_next(messages)
        self._history.messages.extend(messages)
        self._is_cut = False
        if reason:
            self._transcripts.append(Transcript(reason=reason))
        self._transcripts[-1].append_prompt(token_ids)

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        self._is_cut = self._history.cut(keep_recent_turns=keep_recent_turns)

    def restart(self, observation: Observation) -> None:
        self._history, self._tools = self._history.restart(observation), observation.tools
        self._is_cut = False
        self._start_transcript(observation, reason=RESTARTED)

    async def close(self) -> None:
        await self._engine.release(self._session)

    async def _complete(self, token_ids: Sequence[int]) -> Completion:
        return await self._engine.generate(token_ids, self._sampling, session=self._session)

    def _exceeds_context(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> bool:
        limit = self._max_input_length
        return limit is not None and exceeds(self._renderer, messages, limit, tools)

    def _start_transcript(self, observation: Observation, *, reason: str) -> None:
        if self._exceeds_context(observation.messages, observation.tools):
            self._is_full = True
            return
        token_ids = self._render_prompt(observation)
        self._transcripts.append(Transcript(reason=reason))
        self._transcripts[-1].append_prompt(token_ids)

    def _render_prompt(self, prompt: Observation) -> Sequence[int]:
        if isinstance(prompt, ResumedObservation) and prompt.prompt_token_ids is not None:
            return prompt.prompt_token_ids
        return self._renderer.render_prompt(prompt.messages, prompt.tools)

    def _render_next(self, messages: Sequence[Message]) -> tuple[list[int], str]:
        """Return the tokens to append, or all tokens of a new transcript and the reason for it.

        `Renderer.render_continuation` closes a turn that the token limit cut: the missing end-of-turn token is
        part of the prompt, so it is not trained on.
        """
        so_far = self._transcripts[-1].token_ids
        if not self._is_cut:
            joined = self._renderer.render_continuation(so_far[-1], messages)
            if joined is not None:
                return joined, ""
        whole = self._renderer.render_prompt([*self._history.messages, *messages], self._tools)
        if self._is_cut:
            return whole, HISTORY_CUT
        if not self._tools and whole[: len(so_far)] == so_far:
            # Without tools a template that cannot show any still continues the same sequence.
            return whole[len(so_far) :], ""
        return whole, REWRITTEN

    def _annotate(self, messages: Sequence[Message], status: ContextStatus) -> tuple[Message, ...]:
        token_ids, reason = self._render_next(messages)
        return status.annotate(
            messages,
            used_tokens=len(token_ids) + (0 if reason else self.prompt_length),
            turns=self._history.n_turns,
            tools=self._tools,
        )


class MessageConversation:
    """Asks a ChatModel for messages; for teachers and baselines, without tokens to train on."""

    def __init__(
        self, observation: Observation, *, model: ChatModel, sampling: SamplingParams
    ) -> None:
        self._model, self._sampling = model, sampling
        self._history, self._tools = History(observation), observation.tools
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
            self.finish = "stop"
        except ReplyTruncatedError as error:
            message, self.finish = error.message, "length"
        self._history.add_turn(message)
        return message

    def observe(self, messages: Sequence[Message]) -> None:
        self._history.messages.extend(messages)

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        self._history.cut(keep_recent_turns=keep_recent_turns)

    def restart(self, observation: Observation) -> None:
        self._history, self._tools = self._history.restart(observation), observation.tools

    async def close(self) -> None: ...
