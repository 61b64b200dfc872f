"""A simulated run on a measured machine, as text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from skyfleet.analysis.formatting import percent, table
from skyfleet.simulation.machine_profile import MachineProfile
from skyfleet.simulation.run import SimulatedRun
from skyfleet.simulation.workload import Workload


def format_machine_plan(
    runs: Sequence[SimulatedRun], profile: MachineProfile, workload: Workload
) -> str:
    """Markdown."""
    seconds = [run.step_seconds for run in runs]
    first = runs[0]
    rows = [
        ("step", f"{fmean(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f} over seeds)"),
        ("of it waiting for episodes", f"{first.mean('rollout_seconds'):.2f} s"),
        ("of it the update", f"{first.mean('learn_seconds'):.2f} s"),
        ("of it new weights", f"{1000 * first.mean('push_seconds'):.1f} ms"),
        ("trained tokens per second", f"{fmean(run.tokens_per_second for run in runs):,.0f}"),
        ("engine idle", percent(first.engine_idle)),
        ("learner idle", percent(first.learner_idle)),
        ("episodes wait for environments", percent(first.waits_for_environments)),
    ]
    return (
        f"Simulated from costs measured on {profile.machine}; workload: {workload.source}.\n\n"
        f"{table(('quantity', 'estimate'), rows)}\n\n"
        "docs/scaling_plan.md compares such estimates with real runs."
    )
