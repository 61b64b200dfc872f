"""Play every hostile environment of tests/envs/hostile_envs.py beside healthy ones; print what each cost.

    python -m benchmarks.hostile_environments [--only TEXT]

Each kind is one run: one hostile episode and four healthy ones at once. A kind passes if the run goes
on, the hostile episode ends as expected, every healthy one has the grade it has alone, and no thread is
left. The seconds include the limits that a kind exhausts: 0.8 s for an episode and again for its grade,
0.4 s for closing, 6 s for the kinds in worker processes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from datetime import date
from platform import machine, python_version, system

from tests.envs.hostile_envs import KINDS, N_SIBLINGS, Result, run_kind


def format_row(result: Result) -> str:
    failure = result.trajectory.failure
    reason = failure.detail.replace("|", "/").replace("\n", " ")[:90] if failure else ""
    siblings = sum(reward == 1.0 for reward in result.sibling_rewards)
    reward = "unknown" if result.trajectory.reward is None else f"{result.trajectory.reward:g}"
    cells = (
        result.kind.name,
        result.trajectory.ending.value,
        reward,
        reason,
        f"{result.seconds:.2f}",
        f"{result.rss_mb:+.1f}",
        f"{result.n_threads:+d}",
        f"{siblings} of {N_SIBLINGS}",
        "; ".join(result.problems) or "as expected",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="kinds whose name contains this text")
    chosen = parser.parse_args().only
    logging.disable(logging.CRITICAL)
    print(f"On {date.today()}: {system()} {machine()}, Python {python_version()}.\n")
    print(
        "| kind | ending | reward | recorded reason | seconds | RSS MB | threads | siblings | verdict |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    n_runs = n_passed = 0
    for kind in KINDS.values():
        if chosen not in kind.name:
            continue
        n_runs += 1
        try:
            result = asyncio.run(run_kind(kind))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            print(f"| {kind.name} | the run ended | | {type(error).__name__} | | | | | FAILED |")
            continue
        n_passed += not result.problems
        print(format_row(result), flush=True)
    print(f"\n{n_passed} of {n_runs} kinds as expected.")


if __name__ == "__main__":
    main()
