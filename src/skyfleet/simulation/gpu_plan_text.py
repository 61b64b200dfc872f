"""A plan for many GPUs as text: the placements, what saturates first, memory per GPU, the sources."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.analysis.formatting import percent, table
from skyfleet.simulation.card_profile import CardProfile, check_model
from skyfleet.simulation.gpu_plan import GpuPlan
from skyfleet.simulation.workload import Workload

GIB = 2**30
KNOWN_ERROR = (
    "Known error: on two CPU cores 11 of 16 runs were within 15 %, the worst was off by 34 % "
    "(docs/scaling_plan.md). No run on several GPUs has been compared with it."
)
_MAX_PARTS = 4


def format_gpu_plans(
    best: GpuPlan,
    plans: Sequence[GpuPlan],
    profile: CardProfile,
    workload: Workload,
    model: str,
) -> str:
    """Markdown, with the fastest placement first. `best` is one of the plans, with its savings."""
    ordered = sorted(plans, key=lambda plan: (not plan.fits, plan.step_seconds))
    sections = [
        f"Simulated, not measured: {best.placement.n_gpus} x {profile.name}, {model}.",
        _table(ordered),
        _conclude(best, ordered),
        _memory(best),
        _sources(profile, workload, model),
    ]
    return "\n\n".join(sections)


def _table(plans: Sequence[GpuPlan]) -> str:
    head = (
        "GPUs", "step, s", "range", "tokens/s", "engines idle", "learner idle", "workers idle",
        "transfer, s", "GiB per GPU",
    )  # fmt: skip
    return table(head, [_row(plan) for plan in plans])


def _row(plan: GpuPlan) -> tuple[str, ...]:
    run = plan.runs[0]
    low, high = plan.range_seconds
    fits = "" if plan.fits else " (does not fit)"
    return (
        plan.placement.describe(),
        f"{plan.step_seconds:.1f}",
        f"{low:.1f} to {high:.1f}",
        f"{plan.tokens_per_second:,.0f}",
        percent(run.engine_idle),
        percent(run.learner_idle),
        percent(run.worker_idle),
        f"{plan.push_seconds:.2f}",
        f"{plan.peak_bytes / GIB:.0f}{fits}",
    )


def _conclude(best: GpuPlan, plans: Sequence[GpuPlan]) -> str:
    name, share = best.bottleneck, best.savings[best.bottleneck]
    verb = "are" if name.endswith("s") else "is"
    others = [f"{other} {percent(value)}" for other, value in sorted(
        best.savings.items(), key=lambda pair: -pair[1]
    )[1:3]]  # fmt: skip
    sentence = (
        f"{name[0].upper()}{name[1:]} {verb} what limits this run first: at half the time, a step would "
        f"be {percent(share)} shorter (next: {', '.join(others)})."
    )
    if len(plans) > 1:
        sentence = f"Best of {len(plans)} placements: {best.placement.describe()}. {sentence}"
    waiting = percent(best.runs[0].waits_for_environments)
    return f"{sentence} Episodes wait {waiting} of their time for environments."


def _memory(best: GpuPlan) -> str:
    rows = []
    for role, plan in best.memory.items():
        for name, phase in zip(plan.phase_names, plan.phases, strict=True):
            parts = sorted((*plan.held, *phase), key=lambda part: -part.n_bytes)
            text = ", ".join(f"{part.name} {part.n_bytes / GIB:.1f}" for part in parts[:_MAX_PARTS])
            total = sum(part.n_bytes for part in parts)
            rows.append((role, name, f"{total / GIB:.1f}", text))
    return table(("GPU", "phase", "GiB", "largest parts"), rows)


def _sources(profile: CardProfile, workload: Workload, model: str) -> str:
    measured = ", ".join(profile.list_numbers("measured", "fitted"))
    assumed = ", ".join(profile.list_numbers("datasheet", "assumed"))
    return (
        f"The model: {check_model(profile, model)}. Measured, or fitted to measured tables: {measured}. "
        f"From data sheets, or assumed: {assumed}; so is the workload, if it says so: "
        f"{workload.source}. The range is over seeds of the workload, not over what is assumed.\n"
        f"{KNOWN_ERROR}"
    )
