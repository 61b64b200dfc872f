"""Conclusion: what a comparison supports, in sentences."""

from __future__ import annotations

from math import isinf

from skyfleet.evaluation.compare import Change, Comparison, Verdict
from skyfleet.evaluation.table import points


def conclude(comparison: Comparison) -> str:
    """What is shown environment by environment, and then over all."""
    shown = {
        verdict: [env for env, change in comparison.by_env.items() if change.verdict is verdict]
        for verdict in (Verdict.IMPROVED, Verdict.REGRESSED)
    }
    found = [f"{verdict}: {', '.join(envs)}." for verdict, envs in shown.items() if envs]
    if not found:
        found = ["No environment is shown to have changed."]
    return " ".join([f"{comparison.name}:", *found, _overall(comparison.overall)])


def _overall(change: Change) -> str:
    seen = (
        f"Overall {points(change.difference)} points on {change.n_tasks} tasks, "
        f"p = {change.p_value:.2g}"
    )
    if change.verdict in (Verdict.IMPROVED, Verdict.REGRESSED):
        return f"{seen}: {change.verdict}."
    if isinf(change.detectable):
        return f"{seen}: so few tasks would show no change at all."
    could = f"{seen}: so many reliably show a true change of {100 * change.detectable:.1f} points or more"
    if change.tasks_needed is None:
        return f"{could}."
    return f"{could}; the one seen would need {change.tasks_needed:,} tasks."
