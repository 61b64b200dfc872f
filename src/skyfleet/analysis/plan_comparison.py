"""Compare a run with the plan in its folder: what was expected, what it took, and by how much they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyfleet.analysis.formatting import NOTHING, percent, table
from skyfleet.analysis.run_costs import RunCosts, mean, measure_run
from skyfleet.analysis.run_folder import RunFolder
from skyfleet.analysis.run_plan import (
    PLAN,
    QUANTITIES,
    Estimate,
    RunPlan,
    Unit,
    Usage,
    read_plan,
    read_usage,
)
from skyfleet.config.keys import flatten
from skyfleet.errors import ConfigError

AIM = 0.15
"""The difference between plan and reality that is aimed at, as a share."""
_IGNORED_KEYS = ("trainer.run_path", "trainer.ckpt_path", "trainer.export_path", "trainer.run_name")
_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    name: str
    planned: Estimate
    unit: Unit
    actual: float | None
    """None if the run did not record it."""

    @property
    def difference(self) -> float | None:
        """As a share of what the run took; positive if the plan was too high."""
        if not self.actual:
            return None
        return self.planned.value / self.actual - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRow:
    env_key: str
    planned: Estimate
    actual: float | None
    n_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    plan: RunPlan
    rows: tuple[PlanRow, ...]
    signals: tuple[SignalRow, ...]
    notes: tuple[str, ...]

    @property
    def n_compared(self) -> int:
        return sum(row.difference is not None for row in self.rows)

    @property
    def n_within_aim(self) -> int:
        return sum(row.difference is not None and abs(row.difference) <= AIM for row in self.rows)

    def summarize(self) -> str:
        return (
            f"{self.n_within_aim} of {self.n_compared} planned quantities are within "
            f"{percent(AIM)} of what the run took."
        )

    def to_text(self) -> str:
        """Markdown."""
        rows = [
            (
                row.name,
                format_quantity(row.planned.value, row.unit),
                format_interval(row.planned, row.unit),
                NOTHING if row.actual is None else format_quantity(row.actual, row.unit),
                NOTHING if row.difference is None else f"{100 * row.difference:+.0f} %",
            )
            for row in self.rows
        ]
        parts = [table(("quantity", "plan", "95 % interval", "run", "plan - run"), rows)]
        if self.signals:
            shares = [
                (
                    row.env_key,
                    percent(row.planned.value),
                    f"{percent(row.planned.low)} to {percent(row.planned.high)}",
                    NOTHING if row.actual is None else percent(row.actual),
                    str(row.n_groups),
                )
                for row in self.signals
            ]
            head = ("groups with different rewards", "plan", "95 % interval", "run", "groups")
            parts.append(table(head, shares))
        return "\n\n".join([*parts, " ".join([self.summarize(), *self.notes])])


def compare_plan(folder: RunFolder) -> PlanComparison:
    """Compare a run with the plan.json in its folder."""
    try:
        plan = read_plan(folder.path / PLAN)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder.path} has no {PLAN}; run `skyfleet plan` with its configuration before it starts"
        ) from None
    costs, usage = measure_run(folder), read_usage(folder.path)
    rows = tuple(
        PlanRow(
            name=name,
            planned=plan.quantities[name],
            unit=unit,
            actual=_ACTUAL[name](costs, usage, plan),
        )
        for name, unit in QUANTITIES.items()
        if name in plan.quantities
    )
    signals = tuple(
        SignalRow(
            env_key=env_key,
            planned=expected.mixed_groups,
            actual=found.n_mixed / found.n_groups if found and found.n_groups else None,
            n_groups=found.n_groups if found else 0,
        )
        for env_key, expected in plan.signals.items()
        for found in [costs.signals.get(env_key)]
    )
    return PlanComparison(
        plan=plan, rows=rows, signals=signals, notes=tuple(_find_notes(plan, folder, usage))
    )


def _find_notes(plan: RunPlan, folder: RunFolder, usage: Usage | None) -> list[str]:
    notes = []
    now = flatten(folder.config)
    changed = [
        key
        for key in sorted(plan.config.keys() | now.keys())
        if plan.config.get(key) != now.get(key) and key not in _IGNORED_KEYS
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        notes.append(f"The run's configuration differs: {', '.join(changed[:3])}{more}.")
    if usage is not None and usage.from_step:
        notes.append("The run was resumed, so its whole time is not known.")
    return notes


Actual = Callable[[RunCosts, Usage | None, RunPlan], float | None]


def _mean_or_none(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def _whole_run(costs: RunCosts, usage: Usage | None, plan: RunPlan) -> float | None:
    """Only if one process trained the whole run."""
    if usage is None or usage.from_step or usage.to_step != plan.n_steps:
        return None
    return usage.seconds


def _startup(costs: RunCosts, usage: Usage | None, plan: RunPlan) -> float | None:
    whole = _whole_run(costs, usage, plan)
    if whole is None:
        return None
    # The last checkpoint is saved after the last row.
    return whole - costs.recorded_seconds - (_checkpoint(costs) or 0.0)


def _evaluation(costs: RunCosts, *, first: bool) -> float | None:
    by_step = costs.evaluation_seconds
    if not by_step:
        return None
    if first:
        return by_step[min(by_step)]
    return _mean_or_none([seconds for step, seconds in by_step.items() if step != min(by_step)])


def _checkpoint(costs: RunCosts) -> float | None:
    """Without the first one, which takes longer, if there are others."""
    return _mean_or_none(costs.checkpoint_seconds[1:] or costs.checkpoint_seconds)


def _rate(tokens: Sequence[float], seconds: Sequence[float]) -> float | None:
    return sum(tokens) / sum(seconds) if sum(seconds) else None


_ACTUAL: dict[str, Actual] = {
    "startup": _startup,
    "step": lambda costs, *_: _mean_or_none(costs.step_seconds),
    "rollouts per step": lambda costs, *_: _mean_or_none(costs.rollout_seconds),
    "learning per step": lambda costs, *_: _mean_or_none(costs.learn_seconds),
    "first evaluation": lambda costs, *_: _evaluation(costs, first=True),
    "later evaluation": lambda costs, *_: _evaluation(costs, first=False),
    "checkpoint": lambda costs, *_: _checkpoint(costs),
    "whole run": _whole_run,
    "sampled tokens per step": lambda costs, *_: _mean_or_none(costs.sampled_tokens),
    "response tokens per step": lambda costs, *_: _mean_or_none(costs.response_tokens),
    "sampling rate": lambda costs, *_: _rate(costs.sampled_tokens, costs.rollout_seconds),
    "training rate": lambda costs, *_: _rate(costs.response_tokens, costs.learn_seconds),
    "peak memory": lambda _, usage, __: None if usage is None else float(usage.peak_memory_bytes),
}


def format_quantity(value: float, unit: Unit) -> str:
    match unit:
        case "seconds":
            return _format_seconds(value)
        case "bytes":
            return f"{value / _GIB:.2f} GiB" if value >= _GIB / 10 else f"{value / _MIB:.0f} MiB"
        case "tokens":
            return f"{value:,.0f}"
        case "tokens/s":
            return f"{value:,.0f} tokens/s"


def format_interval(estimate: Estimate, unit: Unit) -> str:
    if estimate.low == estimate.high:
        return "measured once"
    low, high = (format_quantity(end, unit) for end in (estimate.low, estimate.high))
    return f"{low} to {high}"


def _format_seconds(value: float) -> str:
    if value >= 2 * 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 120 else f"{value:.2f} s"
