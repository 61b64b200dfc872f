"""The table of docs/scaling_plan.md: Qwen3-8B on 8, 64 and 512 H200, simulated.

    python -m benchmarks.scaling_plan --gpus 8 64 512

The batch grows with the GPUs: 4 prompts x 8 attempts per GPU and step. For the synchronous and the
asynchronous loop: the best placement, what limits it, and the idle shares. Beyond 64 GPUs one step
counts, and only two placements are compared: together, and half and half. Several minutes on one core.
"""

from __future__ import annotations

import argparse
from time import perf_counter

from skyfleet.analysis.formatting import percent
from skyfleet.config.loading import load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.simulation.card_profile import read_card_profile
from skyfleet.simulation.gpu_plan import GpuPlan, GpuPlanner, choose_best
from skyfleet.simulation.placement import list_placements

PRESET = "qwen3_8b_8xh200"
PROMPTS_PER_GPU = 4
LARGE = 64


def make_config(n_gpus: int, staleness: int) -> RunConfig:
    batch = PROMPTS_PER_GPU * n_gpus
    overrides = [
        f"trainer.train_batch_size={batch}",
        f"trainer.policy_mini_batch_size={batch}",
        f"trainer.placement.colocate_all={str(staleness == 0).lower()}",
    ]
    if staleness:
        overrides += [
            "trainer.fully_async.enabled=true",
            f"trainer.fully_async.max_staleness_steps={staleness}",
        ]
    return load_config_file(PRESET, overrides)


def plan(n_gpus: int, staleness: int, n_workers: int) -> GpuPlan:
    config, card = make_config(n_gpus, staleness), read_card_profile("h200")
    planner = GpuPlanner(
        config=config,
        profile=card,
        workload=card.workload,
        workers_per_node=n_workers,
        n_steps=1 if n_gpus > LARGE else 3,
        n_seeds=1,
    )
    placements = list_placements(config, n_gpus, card.gpus_per_node)
    if n_gpus > LARGE:
        placements = [
            one for one in placements if one.is_colocated or 2 * one.learner_gpus == one.n_gpus
        ]
    if len(placements) > 1:
        plans = [planner.plan(placement, finds_bottleneck=False) for placement in placements]
        placements = [choose_best(plans).placement]
    return planner.plan(placements[0])


def print_row(n_gpus: int, staleness: int, found: GpuPlan, seconds: float) -> None:
    run = found.runs[0]
    order = sorted(found.savings.items(), key=lambda pair: -pair[1])
    limits = ", ".join(f"{name} {percent(share)}" for name, share in order[:3])
    loop = f"async, S={staleness}" if staleness else "sync"
    print(
        f"| {n_gpus} | {loop} | {found.placement.describe()} | {found.step_seconds:.0f} | "
        f"{found.tokens_per_second:,.0f} | {found.tokens_per_second / n_gpus:,.0f} | "
        f"{percent(run.engine_idle)} | {percent(run.learner_idle)} | {percent(run.worker_idle)} | "
        f"{found.push_seconds:.1f} | {found.peak_bytes / 2**30:.0f} | {limits} |  <!-- {seconds:.0f} s -->",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--workers", type=int, default=1, help="per node")
    options = parser.parse_args()
    print(
        "| GPUs | loop | best placement | step, s | tokens/s | per GPU | engines idle | learner idle | "
        "workers idle | transfer, s | GiB per GPU | saved by half of |"
    )
    print("|--:|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|")
    for n_gpus in options.gpus:
        for staleness in options.staleness:
            start = perf_counter()
            found = plan(n_gpus, staleness, options.workers)
            print_row(n_gpus, staleness, found, perf_counter() - start)


if __name__ == "__main__":
    main()
