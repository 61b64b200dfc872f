"""Stages of a training step: the records that the checks of each stage read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from torch import Tensor

from skyfleet.algorithms.filters import FilterResult
from skyfleet.algorithms.sample import Sample
from skyfleet.engines.engine import Engine
from skyfleet.learner.batching import mini_batches
from skyfleet.learner.learner import Learner, StepReport
from skyfleet.learner.loss_recorder import LossRecord
from skyfleet.rollouts.episode import Limits
from skyfleet.sentinels.recording_engine import RecordedTranscript
from skyfleet.trajectories.trajectory import Group, Trajectory

MAX_COMPARED_TOKENS = 32_000
"""Tokens per step that are compared one by one."""

Item = TypeVar("Item")


def rotate_share(items: Sequence[Item], n_tokens: int, step: int) -> Sequence[Item]:
    """A part of a large batch, another one every step: a systematic bug is in any part."""
    stride = -(-n_tokens // MAX_COMPARED_TOKENS)
    return items[step % stride :: stride] if stride > 1 else items


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariants:
    """The invariants that a configuration implies, as parameters of the checks."""

    n_samples: int
    """Attempts per group."""
    batch_size: int
    """Prompts per batch."""
    limits: Limits
    envs: frozenset[str]
    """Environments that are trained on."""
    min_per_env: int = 0
    dynamic_sampling: Literal["filter", "replace"] | None = None
    drops_equal_rewards: bool = False
    tolerance: float = 1e-6
    """Rewards this close count as equal."""
    mask_unfinished: bool = False
    changes_rewards: bool = False
    """A filter changes rewards before credit assignment, by length or by finish reason."""
    step_wise: bool = False
    """Each turn is a sample."""
    centred: Literal["group", "batch"] | None = "group"
    """Over what the advantages of the training loop sum to zero; None promises nothing."""
    unit_deviation: bool = False
    """The advantages of each group have standard deviation 1."""
    mini_batch_size: int
    """Prompts per optimizer step."""
    update_epochs: int = 1
    learner_centred: Literal["group", "batch"] | None = None
    """If the learner computes the advantages (KL in reward, critic): over what they are centred."""
    min_probability_mass: float | None = 1.0
    """Share of the vocabulary's mass that the engine samples from at least; None at another
    temperature than the learner's."""
    logprob_tolerance: float = 1e-3
    """Largest mean |learner logprob - engine logprob|."""
    reference_tolerance: float = 1e-3
    """The same for learner and KL reference, which do not depend on the engine."""
    own_reference: bool = False
    """The KL reference is the initial policy."""
    reference_interval: int = -1
    """Steps after which the current policy becomes the reference; -1 never."""
    filter_metrics: tuple[str, ...] = ()
    """Metrics of filters that are on: one that stays 0 never acts."""
    max_staleness: int = 0
    """Updates that the policy may have made since it sampled a token."""
    refills: bool = False
    """Groups from which nothing is learnt are replaced one by one."""


class SampleSums(NamedTuple):
    """Sums over one sample, computed once for several checks. A named tuple: a step makes hundreds."""

    n_action_tokens: int
    advantages: float
    logprobs: float

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> list[SampleSums]:
        return [cls(s.n_action_tokens, sum(s.advantages), sum(s.logprobs)) for s in samples]


def number_attempts(groups: Iterable[Group]) -> dict[tuple[str, int], Trajectory]:
    """Task and index -> graded attempt, numbered across groups as credit assignment does."""
    by_task: dict[str, list[Trajectory]] = {}
    for group in groups:
        by_task.setdefault(group.task_key, []).extend(group.graded)
    return {(key, n): attempt for key, own in by_task.items() for n, attempt in enumerate(own)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStage:
    expected: Invariants
    step: int
    groups: Sequence[Group]
    transcripts: Sequence[RecordedTranscript]
    lost_completions: int
    """Completions that are in no episode."""
    policy_version: int
    """The learner's."""

    @property
    def compared(self) -> Sequence[RecordedTranscript]:
        """Those that are compared token by token."""
        n_tokens = sum([len(recorded.transcript.token_ids) for recorded in self.transcripts])
        return rotate_share(self.transcripts, n_tokens, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageStage:
    expected: Invariants
    step: int
    groups: Sequence[Group]
    kept: FilterResult
    attempts: Mapping[tuple[str, int], Trajectory]
    """Task and index -> attempt, as credit assignment numbers them."""
    samples: Sequence[Sample]
    sums: Sequence[SampleSums]
    n_sampled: Mapping[int, int]
    """`id` of a transcript -> tokens that the engine sampled for it."""

    @property
    def compared(self) -> Sequence[Sample]:
        """Those that are compared token by token."""
        n_tokens = sum([len(sample.token_ids) for sample in self.samples])
        return rotate_share(self.samples, n_tokens, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStage:
    expected: Invariants
    step: int
    samples: Sequence[Sample]
    sums: Sequence[SampleSums]
    policy_version: int
    """The learner's before the step."""
    report: StepReport
    record: LossRecord
    before: Tensor | None
    """Fingerprint of the weights; None if the learner's weights are in another process."""
    after: Tensor | None

    @property
    def n_first_tokens(self) -> int:
        """Action tokens of the first mini-batch, which is scored before any update."""
        first = mini_batches(self.samples, self.expected.mini_batch_size)[0]
        return sum(sums.n_action_tokens for sums in self.sums[: len(first)])


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStage:
    version: int
    """The version that the weight sync returned."""
    previous: int
    """The learner's before the step."""
    learner: Learner
    engines: Sequence[Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsStage:
    expected: Invariants
    metrics: Mapping[str, float]
    first_rows: Sequence[Mapping[str, float]]
    """The first rows of the run."""
    last_rows: Sequence[Mapping[str, float]]
    """The rows before this one, oldest first."""
    first_grading_error: str
    """Of an attempt of this step without a grade."""
