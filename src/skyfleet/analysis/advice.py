"""Advice: what a run's signals, results and failures say should be done next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from skyfleet.analysis.before_after import BehaviourChange
from skyfleet.analysis.failures import FailureClass
from skyfleet.analysis.formatting import percent
from skyfleet.analysis.learning_signal import EnvSignal
from skyfleet.evaluation.compare import Comparison, Verdict

_REMEDIES = {
    FailureClass.CONTEXT_OVERFLOW: "raise generator.max_input_length or max_generate_length",
    FailureClass.OUT_OF_TURNS: "raise generator.max_turns",
    FailureClass.MALFORMED_CALL: "lengthen the warm start, or check the tool-call format",
    FailureClass.ENVIRONMENT_FAULT: "mend the environment before training on",
    FailureClass.VERIFIER_FAULT: "mend the verifier before training on",
}
_COMMON = 0.25
"""A class with less than this share of the failures is not worth a sentence."""
_MUCH = 1.0
"""So many more faults an episode are a policy coming apart, whatever its reward."""


def next_steps(
    signals: Mapping[str, EnvSignal],
    comparisons: Sequence[Comparison],
    changes: Mapping[str, Sequence[BehaviourChange]],
    failures: Mapping[FailureClass, int],
) -> list[str]:
    """Sentences: what got worse, what to train on, what to measure on, what to read.

    `changes` are those of each evaluation set.
    """
    return [
        *(sentence for comparison in comparisons for sentence in _lost(comparison)),
        *(sentence for name, of_set in changes.items() for sentence in _faults(name, of_set)),
        *(signal.advice for signal in signals.values()),
        *(sentence for comparison in comparisons for sentence in _measuring(comparison)),
        *_reading(failures),
    ]


def _lost(comparison: Comparison) -> Iterator[str]:
    if lost := _envs(comparison, Verdict.REGRESSED):
        yield f"{lost} in {comparison.name} regressed: read the tasks it lost before anything else."


def _faults(name: str, changes: Sequence[BehaviourChange]) -> Iterator[str]:
    for quantity in ("tool errors", "malformed calls"):
        worse = [
            f"{change.env_key} ({change.before:.1f} to {change.after:.1f})"
            for change in changes
            if change.quantity == quantity and change.clear and change.difference >= _MUCH
        ]
        if worse:
            yield (
                f"{name}: {quantity} an episode rose in {', '.join(worse)}: "
                "see what it does in `skyfleet diff`."
            )


def _measuring(comparison: Comparison) -> Iterator[str]:
    name = comparison.name
    if saturated := _envs(comparison, Verdict.SATURATED):
        yield f"{saturated} in {name}: nothing is left to gain; measure on harder tasks."
    if failing := _envs(comparison, Verdict.FAILING):
        yield f"{failing} in {name}: passed neither before nor after; add tasks that lie between."
    for env_key, change in comparison.by_env.items():
        if change.verdict is Verdict.UNDERPOWERED and change.tasks_needed is not None:
            yield (
                f"{env_key} in {name} is too small to tell: {change.tasks_needed:,} tasks would "
                f"show the {100 * change.difference:+.1f} points seen."
            )


def _envs(comparison: Comparison, verdict: Verdict) -> str:
    return ", ".join(e for e, change in comparison.by_env.items() if change.verdict is verdict)


def _reading(failures: Mapping[FailureClass, int]) -> Iterator[str]:
    total = sum(failures.values())
    for kind, count in failures.items():
        if count >= _COMMON * total:
            remedy = _REMEDIES.get(kind, "read examples in `skyfleet view`")
            yield f"{percent(count / total)} of the failures are {kind}: {remedy}."
