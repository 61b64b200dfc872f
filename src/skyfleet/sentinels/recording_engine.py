"""RecordingEngine: an engine that forwards every call and records what was sampled.

The checks compare the transcripts, samples and loss inputs of a step with this record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from skyfleet.algorithms.sample import find_action_spans
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.transcript import Completion, Transcript
from skyfleet.engines.chat_engine import ChatCompletion, ChatEngine
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.trajectories.trajectory import Group, Trajectory

TAIL = 64
"""Tokens of a prompt that are recorded beside its length: the whole prompt would cost more than a
turn from the cache."""


class RecordedCompletion(NamedTuple):
    """One turn as the engine sampled it. A named tuple, because a step makes one per turn."""

    prompt_length: int
    prompt_tail: int
    """Hash of the prompt's last tokens."""
    completion: Completion
    max_generate_length: int

    def follows(self, token_ids: Sequence[int]) -> bool:
        """Whether the prompt was the beginning of `token_ids`."""
        return self.prompt_tail == _hash_tail(token_ids, self.prompt_length)


class RecordedTranscript(NamedTuple):
    """One transcript of an episode, and the completions that the engine sampled for it."""

    trajectory: Trajectory
    transcript: Transcript
    completions: tuple[RecordedCompletion, ...]

    @property
    def n_sampled(self) -> int:
        return sum([len(recorded.completion.token_ids) for recorded in self.completions])


class RecordingEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._completions: dict[str, list[RecordedCompletion]] = defaultdict(list)
        """By session."""

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._engine.policy_version = version

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        length, tail = len(token_ids), hash(tuple(token_ids[-TAIL:]))
        completion = await self._engine.generate(token_ids, sampling, session=session)
        if completion.finish != "abort":  # an aborted turn is in no episode
            recorded = RecordedCompletion(length, tail, completion, sampling.max_generate_length)
            self._completions[session].append(recorded)
        return completion

    def forget(self, session: str, n_completions: int) -> None:
        """The last completions of a session are in no episode: it is played again from the start."""
        if n_completions:
            del self._completions[session][-n_completions:]

    def record_chat(self, turn: ChatCompletion, sampling: SamplingParams, session: str) -> None:
        """Record a turn that a server rendered and sampled."""
        prompt, completion = turn.prompt_token_ids, turn.completion
        recorded = RecordedCompletion(
            len(prompt), hash(prompt[-TAIL:]), completion, sampling.max_generate_length
        )
        self._completions[session].append(recorded)

    async def release(self, session: str) -> None:
        await self._engine.release(session)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    def drain(
        self,
        groups: Iterable[Group],
        restored: Sequence[Trajectory] = (),
        *,
        is_open: Callable[[str], bool] = lambda _: False,
    ) -> tuple[tuple[RecordedTranscript, ...], int]:
        """Every transcript with its completions, and the number of completions in no transcript.

        A session is called `task/attempt`, as `run_episode` calls it. The record is cleared, except
        for sessions that are `is_open`, whose groups come later. Episodes that an earlier process
        played are not in it; their completions are those of the transcript.
        """
        earlier = {id(trajectory) for trajectory in restored}
        transcripts: list[RecordedTranscript] = []
        for group in groups:
            for trajectory in group.trajectories:
                if id(trajectory) in earlier:
                    transcripts += (
                        RecordedTranscript(trajectory, transcript, _read_completions(transcript))
                        for transcript in trajectory.transcripts
                    )
                    continue
                recorded = self._completions[f"{trajectory.task_key}/{trajectory.sample}"]
                begin = 0
                for transcript in trajectory.transcripts:
                    end = begin + len(transcript.policy_versions)
                    own, begin = tuple(recorded[begin:end]), end
                    transcripts.append(RecordedTranscript(trajectory, transcript, own))
                del recorded[:begin]  # a task sampled twice in a step has the same sessions
        done = [session for session in self._completions if not is_open(session)]
        lost = sum(len(self._completions.pop(session)) for session in done)
        return tuple(transcripts), lost


class RecordingChat:
    """A chat engine that forwards every call and records what was sampled."""

    def __init__(
        self, chat: ChatEngine, recording_engine: RecordingEngine, *, max_input_length: int
    ) -> None:
        """A turn after a longer prompt is discarded, as one without tokens is: neither is recorded."""
        self._chat, self._recording_engine = chat, recording_engine
        self._max_input_length = max_input_length

    @property
    def policy_version(self) -> int:
        return self._chat.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._chat.policy_version = version

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> ChatCompletion:
        turn = await self._chat.chat(messages, tools, sampling, session=session)
        if turn.completion.token_ids and len(turn.prompt_token_ids) <= self._max_input_length:
            self._recording_engine.record_chat(turn, sampling, session)
        return turn

    async def release(self, session: str) -> None:
        await self._chat.release(session)


def _read_completions(transcript: Transcript) -> tuple[RecordedCompletion, ...]:
    """One completion per version; a completion without a token of its own is empty."""
    token_ids, logprobs = transcript.token_ids[:], transcript.logprobs[:]
    spans = find_action_spans(transcript.loss_mask[:])
    spans += [(0, 0)] * (len(transcript.policy_versions) - len(spans))
    return tuple(
        RecordedCompletion(
            begin,
            _hash_tail(token_ids, begin),
            Completion(
                token_ids=tuple(token_ids[begin:end]),
                logprobs=tuple(logprobs[begin:end]),
                finish="stop",
                policy_version=version,
            ),
            end - begin,
        )
        for (begin, end), version in zip(spans, transcript.policy_versions, strict=False)
    )


def _hash_tail(token_ids: Sequence[int], length: int) -> int:
    return hash(tuple(token_ids[max(length - TAIL, 0) : length]))
