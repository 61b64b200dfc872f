"""A plan as text: quantities with intervals, memory by phase, learning signal, detectable gains, dollars."""

from __future__ import annotations

from skyfleet.analysis.formatting import format_count, percent, table
from skyfleet.analysis.plan_comparison import format_interval, format_quantity
from skyfleet.analysis.run_plan import QUANTITIES, DetectableGain, RunPlan

_LITTLE_SIGNAL = 0.25
"""With fewer mixed groups the tasks are too hard or too easy."""
_MAX_PARTS = 4


def format_plan(plan: RunPlan) -> str:
    """Markdown."""
    sections = [_head(plan), _quantities(plan), _memory(plan), _signals(plan), _detectable(plan)]
    return "\n\n".join(part for part in (*sections, _dollars(plan)) if part)


def _head(plan: RunPlan) -> str:
    warm = f"{plan.n_warm_start_steps} warm-start steps, " if plan.n_warm_start_steps else ""
    return (
        f"Plan of {plan.run_name}: {warm}{format_count(plan.n_steps, 'step')} of "
        f"{plan.n_episodes} episodes, {format_count(plan.n_evaluations, 'evaluation')}, "
        f"{format_count(plan.n_checkpoints, 'checkpoint')}.\n"
        f"Measured on {plan.machine}, from {format_count(plan.n_probe_steps, 'step')}."
    )


def _quantities(plan: RunPlan) -> str:
    rows = [
        (
            name,
            format_quantity(plan.quantities[name].value, unit),
            format_interval(plan.quantities[name], unit),
        )
        for name, unit in QUANTITIES.items()
        if name in plan.quantities
    ]
    return table(("quantity", "estimate", "95 % interval"), rows)


def _memory(plan: RunPlan) -> str:
    if not plan.memory:
        return "Memory is not planned: the model's shape is unknown."
    rows = []
    for phase in plan.memory:
        largest = sorted(phase.parts.items(), key=lambda part: -part[1])[:_MAX_PARTS]
        parts = ", ".join(f"{name} {format_quantity(size, 'bytes')}" for name, size in largest)
        rows.append((phase.name, format_quantity(phase.n_bytes, "bytes"), parts))
    return table(("phase", "memory at most", "largest parts"), rows)


def _signals(plan: RunPlan) -> str:
    if not plan.signals:
        return ""
    rows = [
        (
            env_key,
            percent(signal.pass_rate),
            percent(signal.mixed_groups.value),
            f"{percent(signal.mixed_groups.low)} to {percent(signal.mixed_groups.high)}",
            str(signal.n_groups),
        )
        for env_key, signal in plan.signals.items()
    ]
    little = [
        env_key
        for env_key, signal in plan.signals.items()
        if signal.mixed_groups.high < _LITTLE_SIGNAL
    ]
    head = ("environment", "pass rate", "groups with different rewards", "95 % interval", "groups")
    maybe = [
        f"{env_key} ({format_count(signal.n_groups, 'group')})"
        for env_key, signal in plan.signals.items()
        if signal.mixed_groups.value < _LITTLE_SIGNAL and env_key not in little
    ]
    limit = percent(_LITTLE_SIGNAL)
    advice = f"\nFewer than {limit} in {', '.join(little)}: too hard or too easy." if little else ""
    if maybe:
        advice += (
            f"\nFewer than {limit} in {', '.join(maybe)}, measured in too few groups to be sure; "
            "measure more with --steps."
        )
    return table(head, rows) + advice


def _detectable(plan: RunPlan) -> str:
    if not plan.detectable:
        return ""
    rows = [
        (name, f"{gain.n_tasks} x {gain.attempts}", _format_gain(gain))
        for name, gain in plan.detectable.items()
    ]
    head = ("evaluation set", "tasks x attempts", "smallest gain detected with 80 % power")
    return table(head, rows)


def _format_gain(gain: DetectableGain) -> str:
    if gain.low is None:
        return "none: use more tasks"
    if gain.high is None:
        return f"{100 * gain.low:.1f} points at best"
    ends = dict.fromkeys(f"{100 * end:.1f}" for end in (gain.low, gain.high))
    return f"{' to '.join(ends)} points"


def _dollars(plan: RunPlan) -> str:
    if not plan.prices:
        return f"Dollars: {plan.price_note}" if plan.price_note else ""
    whole = plan.quantities["whole run"].scaled(1 / 3600)
    rows = [
        (
            price.cloud,
            price.instance,
            f"{price.dollars_per_hour:.2f}",
            f"{whole.value * price.dollars_per_hour:.2f}",
            f"{whole.low * price.dollars_per_hour:.2f} to "
            f"{whole.high * price.dollars_per_hour:.2f}",
        )
        for price in plan.prices
    ]
    head = ("cloud", "instance", "dollars per hour", "dollars of the run", "95 % interval")
    return table(head, rows) + (f"\n{plan.price_note}" if plan.price_note else "")
