"""RunCosts: what each step of a run took, in seconds and tokens, and what it could learn from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from skyfleet.analysis.learning_signal import compute_signals
from skyfleet.analysis.run_folder import RunFolder, warn
from skyfleet.trajectories.entry import Entry

STEP, ROLLOUT, LEARN = "timing/step", "timing/generate", "timing/train_critic_and_policy"
EVALUATION, CHECKPOINT = "timing/eval", "timing/save_checkpoints"
_RESPONSE_TOKENS = "generate/avg_num_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """The groups of one environment: how many there were, and how many had different rewards."""

    n_groups: int
    n_mixed: int
    pass_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """One number per step, in the order of the steps."""

    steps: tuple[int, ...]
    step_seconds: tuple[float, ...]
    rollout_seconds: tuple[float, ...]
    learn_seconds: tuple[float, ...]
    sampled_tokens: tuple[float, ...]
    response_tokens: tuple[float, ...]
    """Sampled tokens and the observations between them, which are what the learner reads."""
    evaluation_seconds: Mapping[int, float]
    """By step."""
    checkpoint_seconds: tuple[float, ...]
    signals: Mapping[str, Signal]
    """By environment."""

    @property
    def recorded_seconds(self) -> float:
        """Of all steps, evaluations and checkpoints."""
        parts = (self.step_seconds, self.evaluation_seconds.values(), self.checkpoint_seconds)
        return sum(map(sum, parts))


def measure_run(folder: RunFolder, *, from_step: int = 1) -> RunCosts:
    """The costs of the steps from `from_step` on; evaluations and checkpoints of all steps."""
    rows = [row for row in folder.timing() if STEP in row and row["step"] >= from_step]
    steps = [int(row["step"]) for row in rows]
    metrics = {int(row["step"]): row for row in folder.metrics()}
    by_step: dict[int, list[Entry]] = defaultdict(list)
    for entry in folder.entries(on_damage=warn):
        if entry.kind == "train" and entry.step >= from_step:
            by_step[entry.step].append(entry)
    timing = folder.timing()
    return RunCosts(
        steps=tuple(steps),
        step_seconds=_read(rows, STEP),
        rollout_seconds=_read(rows, ROLLOUT),
        learn_seconds=_read(rows, LEARN),
        sampled_tokens=tuple(
            float(sum(entry.sampled_tokens for entry in by_step[step])) for step in steps
        ),
        response_tokens=tuple(
            (metrics.get(step, {}).get(_RESPONSE_TOKENS) or 0.0) * len(by_step[step])
            for step in steps
        ),
        evaluation_seconds={
            int(row["step"]): row[EVALUATION] for row in timing if EVALUATION in row
        },
        checkpoint_seconds=tuple(row[CHECKPOINT] for row in timing if CHECKPOINT in row),
        signals=_count_signals([entry for entries in by_step.values() for entry in entries]),
    )


def _read(rows: Sequence[Mapping[str, float]], key: str) -> tuple[float, ...]:
    """A step without anything to learn has no time of learning."""
    return tuple(row.get(key) or 0.0 for row in rows)


def _count_signals(entries: Sequence[Entry]) -> dict[str, Signal]:
    found = {}
    for env_key, signal in compute_signals(entries).items():
        whole = signal.whole_run
        found[env_key] = Signal(
            n_groups=whole.n_groups,
            n_mixed=round(whole.mixed_groups * whole.n_groups),
            pass_rate=whole.pass_rate,
        )
    return found


def mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
