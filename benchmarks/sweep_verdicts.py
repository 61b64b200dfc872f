"""How often a sweep finds a difference between two settings, with and without a true one.

Simulated evaluations: tasks of very different difficulty, two attempts each, and training seeds that
shift the skill of a policy. A test over tasks alone takes these shifts for effects of the setting.
`python -m benchmarks.sweep_verdicts --trials 500`
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from skyfleet.evaluation.compare import compare
from skyfleet.evaluation.compare_seeds import _find_common_tasks, _merge_reports, compare_over_seeds
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import EnvScore, TaskOutcome

ATTEMPTS = 2
TASK_SHIFT = 0.35
"""Standard deviation of a setting's effect on a task, in logits."""
GAIN = 0.4
"""The true effect, in logits: about 6 points."""


def draw_reports(
    rng: np.random.Generator, logits: NDArray[np.float64], n_seeds: int, seed_shift: float
) -> dict[int, EvalReport]:
    """One report per seed; each seed shifts all logits."""
    shifts = rng.normal(0, seed_shift, n_seeds)
    return {seed: build_report(rng, logits + shift) for seed, shift in enumerate(shifts)}


def build_report(rng: np.random.Generator, logits: NDArray[np.float64]) -> EvalReport:
    successes = rng.binomial(ATTEMPTS, 1 / (1 + np.exp(-logits)))
    outcomes = {
        f"t{n:04d}": TaskOutcome(env_key="e", successes=int(count), rewards=(0.0,) * ATTEMPTS)
        for n, count in enumerate(successes)
    }
    overall = EnvScore.from_outcomes(list(outcomes.values()))
    return EvalReport(name="val", step=1, overall=overall, by_env={}, outcomes=outcomes)


def measure(
    rng: np.random.Generator,
    n_tasks: int,
    n_seeds: int,
    seed_shift: float,
    gain: float,
    trials: int,
) -> tuple[float, float]:
    """Shares of significant results of the test over tasks alone, and over tasks and seeds."""
    alone = both = 0
    for _ in range(trials):
        rate = np.clip(rng.beta(0.6, 1.4, n_tasks), 1e-3, 1 - 1e-3)
        logits = np.log(rate / (1 - rate))
        # Both settings, so that without a gain neither is better on average.
        shifts = rng.normal(0, TASK_SHIFT, (2, n_tasks))
        before = draw_reports(rng, logits + shifts[0], n_seeds, seed_shift)
        after = draw_reports(rng, logits + shifts[1] + gain, n_seeds, seed_shift)
        alone += _compare_tasks(before, after) < 0.05
        both += compare_over_seeds(before, after).change.p_value < 0.05
    return alone / trials, both / trials


def _compare_tasks(before: Mapping[int, EvalReport], after: Mapping[int, EvalReport]) -> float:
    keys = _find_common_tasks([before, after])
    return compare(_merge_reports(keys, before), _merge_reports(keys, after)).overall.p_value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=500)
    trials = parser.parse_args().trials
    rng = np.random.default_rng(0)
    print(
        "| tasks | seeds | shift between seeds | false, tasks alone | false, tasks and seeds | found |"
    )
    print("|--:|--:|--:|--:|--:|--:|")
    for n_tasks in (60, 360):
        for n_seeds in (2, 3, 5):
            for seed_shift in (0.0, 0.3):
                alone, both = measure(rng, n_tasks, n_seeds, seed_shift, 0.0, trials)
                _, found = measure(rng, n_tasks, n_seeds, seed_shift, GAIN, trials)
                shares = " | ".join(f"{100 * share:.1f} %" for share in (alone, both, found))
                print(f"| {n_tasks} | {n_seeds} | {seed_shift:g} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
