"""`skyfleet plan --gpus N` and `--measure`: a run on hardware that is not here, by simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skyfleet.cli.interrupting import cancel_on_ctrl_c, exit_interrupted
from skyfleet.errors import ConfigError
from skyfleet.terminal import print

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig
    from skyfleet.simulation.workload import Workload

PROFILE = "profile.json"


def measure_profile(config: RunConfig, output: Path | None) -> Path:
    """Write the profile of this machine; returns its path."""
    from skyfleet.envs.event_loop import run_loop
    from skyfleet.simulation.machine_profile import write_profile
    from skyfleet.simulation.measure import measure_machine

    measuring = measure_machine(config, on_progress=lambda line: print(f"plan: {line}", flush=True))
    try:
        profile = run_loop(cancel_on_ctrl_c(measuring))
    except KeyboardInterrupt:
        exit_interrupted(lambda: "Interrupted. Nothing was written.")
    path = output or Path(config.trainer.run_path) / PROFILE
    write_profile(path, profile)
    print(f"The profile of {profile.machine} is in {path}.")
    return path


def print_gpu_plan(
    config: RunConfig,
    n_gpus: int,
    *,
    profile: str,
    placements: str,
    workload: Path | None,
    tool_seconds: str,
    rollout_workers: int,
) -> None:
    from skyfleet.simulation.card_profile import read_card_profile
    from skyfleet.simulation.machine_profile import read_machine_profile
    from skyfleet.simulation.workload import parse_distribution, read_workload

    if placements not in ("config", "all"):
        raise ConfigError(f"--placements {placements}: write config, or all to compare every split")
    given = read_workload(workload) if workload else None
    waits = parse_distribution(tool_seconds, option="--tool-seconds") if tool_seconds else None

    def choose(own: Workload) -> Workload:
        chosen = given or own
        return chosen.model_copy(update={"tool_seconds": waits}) if waits else chosen

    if _is_machine_profile(profile):
        machine = read_machine_profile(Path(profile))
        _print_machine_plan(config, n_gpus, profile, choose(machine.workload))
        return
    card = read_card_profile(profile)
    from skyfleet.simulation.gpu_plan import GpuPlanner, choose_best
    from skyfleet.simulation.gpu_plan_text import format_gpu_plans
    from skyfleet.simulation.placement import list_placements, read_placement

    planner = GpuPlanner(
        config=config,
        profile=card,
        workload=choose(card.workload),
        workers_per_node=rollout_workers,
    )
    chosen = (
        list_placements(config, n_gpus, card.gpus_per_node)
        if placements == "all"
        else [read_placement(config, n_gpus, card.gpus_per_node)]
    )
    plans = [planner.plan(placement, finds_bottleneck=False) for placement in chosen]
    best = planner.plan(choose_best(plans).placement)
    model = config.trainer.policy.model.path
    print(format_gpu_plans(best, plans, card, planner.workload, model))


def _print_machine_plan(config: RunConfig, n_gpus: int, profile: str, workload: Workload) -> None:
    from skyfleet.simulation.machine_plan import simulate_machine
    from skyfleet.simulation.machine_plan_text import format_machine_plan
    from skyfleet.simulation.machine_profile import read_machine_profile

    if n_gpus != 1:
        raise ConfigError(
            f"--gpus {n_gpus}: --profile {profile} is of one machine; use --gpus 1, or a stored profile "
            "of a card such as h200"
        )
    measured = read_machine_profile(Path(profile))
    print(format_machine_plan(simulate_machine(config, measured, workload), measured, workload))


def _is_machine_profile(name: str) -> bool:
    """Whether it is a file that --measure wrote."""
    path = Path(name)
    return path.suffix == ".json" and (
        not path.is_file() or '"kind": "machine"' in path.read_text("utf-8").replace('":"', '": "')
    )
