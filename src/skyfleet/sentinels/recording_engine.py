"""Witness: an engine that passes everything on and remembers what was sampled.

What the engine said is written down where it said it, so that what episodes, samples and the loss
make of it can be held against it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from skyfleet.chat.transcript import Completion, Transcript
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.trajectories.trajectory import Group, Trajectory

TAIL = 64
"""Tokens of a prompt that are remembered, beside its length: all of it would cost more than a
cached turn does."""


class Heard(NamedTuple):
    """A step makes one for every turn."""

    prompt_length: int
    prompt_tail: int
    """Hash of the prompt's last tokens."""
    completion: Completion
    max_generate_length: int

    def follows(self, token_ids: Sequence[int]) -> bool:
        """Whether the engine was shown the beginning of `token_ids`."""
        return self.prompt_tail == _tail(token_ids, self.prompt_length)


class Speech(NamedTuple):
    """One transcript of an episode, and what the engine said for it."""

    trajectory: Trajectory
    transcript: Transcript
    heard: tuple[Heard, ...]

    @property
    def n_sampled(self) -> int:
        return sum([len(said.completion.token_ids) for said in self.heard])


class RecordingEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._heard: dict[str, list[Heard]] = defaultdict(list)
        """Session -> what was said in it."""

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
        if completion.finish != "abort":  # half a turn is in no episode
            heard = Heard(length, tail, completion, sampling.max_generate_length)
            self._heard[session].append(heard)
        return completion

    async def release(self, session: str) -> None:
        await self._engine.release(session)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    def testify(self, groups: Iterable[Group]) -> tuple[tuple[Speech, ...], int]:
        """Every transcript with what was heard for it, and how many completions are in none.

        A session is called `task/attempt`, as `run_episode` calls it; what was heard is forgotten.
        """
        speeches: list[Speech] = []
        for group in groups:
            for trajectory in group.trajectories:
                heard = self._heard[f"{trajectory.task_key}/{trajectory.sample}"]
                begin = 0
                for transcript in trajectory.transcripts:
                    end = begin + len(transcript.policy_versions)
                    own, begin = tuple(heard[begin:end]), end
                    speeches.append(Speech(trajectory, transcript, own))
                del heard[:begin]  # a task that is drawn again in the step has the same sessions
        lost = sum(map(len, self._heard.values()))
        self._heard.clear()
        return tuple(speeches), lost


def _tail(token_ids: Sequence[int], length: int) -> int:
    return hash(tuple(token_ids[max(length - TAIL, 0) : length]))
