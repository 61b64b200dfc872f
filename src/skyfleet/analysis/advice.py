"""Advice: suggested next steps from the signals, results and failures of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from skyfleet.analysis.before_after import BehaviourChange
from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.formatting import percent
from skyfleet.analysis.learning_signal import EnvSignal
from skyfleet.evaluation.compare import Comparison, Verdict

_REMEDIES = {
    FailureClass.CONTEXT_OVERFLOW: "raise generator.max_input_length or max_generate_length",
    FailureClass.OUT_OF_TURNS: "raise generator.max_turns",
    FailureClass.MALFORMED_CALL: "lengthen the warm start or check the tool-call format",
    FailureClass.ENVIRONMENT_FAULT: "fix the environment before you continue training",
    FailureClass.VERIFIER_FAULT: "fix the verifier before you continue training",
}
_COMMON = 0.25
"""Classes with a smaller share of the failures are not mentioned."""
_LARGE_INCREASE = 1.0
"""An increase by this many errors per episode is reported, whatever the reward."""


def suggest_next_steps(
    signals: Mapping[str, EnvSignal],
    comparisons: Sequence[Comparison],
    changes: Mapping[str, Sequence[BehaviourChange]],
    failures: Mapping[FailureClass, int],
) -> list[str]:
    """Sentences about regressions, errors, training tasks, evaluation sets and failures.

    `changes` are by evaluation set.
    """
    return [
        *(sentence for comparison in comparisons for sentence in _regressions(comparison)),
        *(sentence for name, in_set in changes.items() for sentence in _errors(name, in_set)),
        *(signal.advice for signal in signals.values()),
        *(sentence for comparison in comparisons for sentence in _evaluation(comparison)),
        *_common_failures(failures),
    ]


def _regressions(comparison: Comparison) -> Iterator[str]:
    if regressed := _envs(comparison, Verdict.REGRESSED):
        yield f"{regressed} in {comparison.name} regressed; read the lost tasks first."


def _errors(name: str, changes: Sequence[BehaviourChange]) -> Iterator[str]:
    for quantity in ("tool errors", "malformed calls"):
        worse = [
            f"{change.env_key} ({change.before:.1f} to {change.after:.1f})"
            for change in changes
            if change.quantity == quantity
            and change.is_clear
            and change.difference >= _LARGE_INCREASE
        ]
        if worse:
            yield (
                f"{name}: {quantity} per episode increased in {', '.join(worse)}; "
                "compare episodes with `skyfleet diff`."
            )


def _evaluation(comparison: Comparison) -> Iterator[str]:
    name = comparison.name
    if saturated := _envs(comparison, Verdict.SATURATED):
        yield f"{saturated} in {name}: saturated; evaluate on harder tasks."
    if failing := _envs(comparison, Verdict.FAILING):
        yield f"{failing} in {name}: failing before and after; add easier tasks."
    for env_key, change in comparison.by_env.items():
        if change.verdict is Verdict.UNDERPOWERED and change.tasks_needed is not None:
            yield (
                f"{env_key} in {name} is underpowered: {change.tasks_needed:,} tasks are needed to "
                f"detect the observed {100 * change.difference:+.1f} points."
            )


def _envs(comparison: Comparison, verdict: Verdict) -> str:
    return ", ".join(e for e, change in comparison.by_env.items() if change.verdict is verdict)


def _common_failures(failures: Mapping[FailureClass, int]) -> Iterator[str]:
    total = sum(failures.values())
    for kind, count in failures.items():
        if count >= _COMMON * total:
            remedy = _REMEDIES.get(kind, "read examples in `skyfleet view`")
            yield f"{percent(count / total)} of the failures are {kind}; {remedy}."
