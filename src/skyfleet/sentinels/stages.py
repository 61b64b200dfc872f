"""Hops: the records of each part of a step, as sentinels are shown them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from skyfleet.algorithms.filters import FilterResult
from skyfleet.algorithms.sample import Sample
from skyfleet.engines.engine import Engine
from skyfleet.learner.batching import mini_batches
from skyfleet.learner.learner import Learner, StepReport
from skyfleet.sentinels.invariants import Invariants
from skyfleet.sentinels.loss_recorder import SeenLoss
from skyfleet.sentinels.recording_engine import Speech
from skyfleet.trajectories.trajectory import Group, Trajectory

CLOSELY = 32_000
"""Tokens a step that are compared one by one."""

Item = TypeVar("Item")


def share(items: Sequence[Item], n_tokens: int, step: int) -> Sequence[Item]:
    """Of a large batch a part, another one each step: a bug that is everywhere is in any part."""
    stride = -(-n_tokens // CLOSELY)
    return items[step % stride :: stride] if stride > 1 else items


class Digest(NamedTuple):
    """The sums of a sample: counted once, asked for by many. A step makes hundreds."""

    n_action_tokens: int
    advantages: float
    logprobs: float

    @classmethod
    def of_each(cls, samples: Sequence[Sample]) -> list[Digest]:
        return [cls(s.n_action_tokens, sum(s.advantages), sum(s.logprobs)) for s in samples]


def numbered(groups: Iterable[Group]) -> dict[tuple[str, int], Trajectory]:
    """A task's graded attempts, one after another, whichever group they are in."""
    by_task: dict[str, list[Trajectory]] = {}
    for group in groups:
        by_task.setdefault(group.task_key, []).extend(group.graded)
    return {(key, n): attempt for key, own in by_task.items() for n, attempt in enumerate(own)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    expected: Invariants
    step: int
    groups: Sequence[Group]
    speeches: Sequence[Speech]
    lost_completions: int
    """Sampled, and in no episode."""
    policy_version: int
    """The learner's."""

    @property
    def closely(self) -> Sequence[Speech]:
        n_tokens = sum([len(speech.transcript.token_ids) for speech in self.speeches])
        return share(self.speeches, n_tokens, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    expected: Invariants
    step: int
    groups: Sequence[Group]
    kept: FilterResult
    attempts: Mapping[tuple[str, int], Trajectory]
    """Task and number -> attempt, as credit numbers them."""
    samples: Sequence[Sample]
    digests: Sequence[Digest]
    sampled: Mapping[int, int]
    """`id` of a transcript -> tokens that the engine sampled for it."""

    @property
    def closely(self) -> Sequence[Sample]:
        n_tokens = sum([len(sample.token_ids) for sample in self.samples])
        return share(self.samples, n_tokens, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    expected: Invariants
    step: int
    samples: Sequence[Sample]
    digests: Sequence[Digest]
    policy_version: int
    """The learner's before the step."""
    report: StepReport
    seen: SeenLoss
    before: Tensor | None
    """The weights' fingerprint; None where the learner's weights are elsewhere."""
    after: Tensor | None

    @property
    def n_first(self) -> int:
        """Chosen tokens of the first mini-batch: what was scored before any update."""
        first = mini_batches(self.samples, self.expected.mini_batch_size)[0]
        return sum(digest.n_action_tokens for digest in self.digests[: len(first)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    version: int
    """What the sync says is served now."""
    previous: int
    """The learner's before the step."""
    learner: Learner
    engines: Sequence[Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    expected: Invariants
    metrics: Mapping[str, float]
    began: Sequence[Mapping[str, float]]
    """The run's first rows."""
    lately: Sequence[Mapping[str, float]]
    """The rows just before this one, oldest first."""
    first_grading_error: str
    """Of an attempt of this step without a grade."""
