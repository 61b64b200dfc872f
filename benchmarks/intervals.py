"""How often intervals hold and verdicts are false: simulated evaluations whose truth is known.

A task's own chance of success is drawn from a beta distribution around the set's rate, which is
itself drawn from a band: single rates make every interval of counts jump up and down around its
coverage, the mean over a band does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date

import numpy as np
import numpy.typing as npt
import scipy

from skyfleet.evaluation.best import ALPHA, best_step
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import TaskOutcome
from skyfleet.metrics.intervals import Interval, cluster_bootstrap, paired_difference, wilson
from skyfleet.metrics.significance import holm, sign_flip

SIZES = (10, 20, 50, 100, 200, 500)
ATTEMPTS = (1, 2, 4, 8)
BANDS = {"0.1 to 0.9": (0.1, 0.9), "0.02 to 0.1": (0.02, 0.1), "0.9 to 0.98": (0.9, 0.98)}
CONCENTRATION = 2.0
"""Of the beta distribution: many tasks nearly always pass or nearly never do."""
LOOKS = 20
ENVS = 4

Rng = np.random.Generator
Rates = npt.NDArray[np.float64]
_EMPTY = EvalReport.of("simulated", [], step=0)


def draw_chances(rng: Rng, rate: float, n_tasks: int) -> Rates:
    return rng.beta(CONCENTRATION * rate, CONCENTRATION * (1 - rate), n_tasks)


def one_report_holds(rng: Rng, band: tuple[float, float], n_tasks: int, attempts: int) -> bool:
    rate = rng.uniform(*band)
    rates = rng.binomial(attempts, draw_chances(rng, rate, n_tasks)) / attempts
    return _holds(rate, interval_of(rates.tolist(), attempts))


def interval_of(rates: Sequence[float], attempts: int) -> Interval:
    """As a report has it, with fewer resamples."""
    if attempts == 1:
        return wilson(sum(rates) / len(rates), len(rates))
    return cluster_bootstrap(rates, n_resamples=2000)


def difference_holds(rng: Rng, band: tuple[float, float], n_tasks: int, attempts: int) -> bool:
    """Half of the time nothing changes; otherwise up to 30 % of what is missing is gained."""
    rate = rng.uniform(*band)
    gain = rng.choice([0.0, rng.uniform(0, 0.3)])
    chances = draw_chances(rng, rate, n_tasks)
    eased = chances + gain * (1 - chances)
    differences = (rng.binomial(attempts, eased) - rng.binomial(attempts, chances)) / attempts
    held = paired_difference(differences.tolist(), attempts=attempts)
    return _holds(gain * (1 - rate), held)


def false_alarm(rng: Rng, band: tuple[float, float], n_tasks: int, attempts: int) -> bool:
    """Nothing changed; is the set said to have?"""
    return _p_value(_unchanged(rng, band, n_tasks, attempts)) < ALPHA


def false_alarm_anywhere(rng: Rng, band: tuple[float, float], n_tasks: int, attempts: int) -> bool:
    """Nothing changed; is any of its four environments said to have?"""
    differences = _unchanged(rng, band, n_tasks, attempts)
    return min(holm([_p_value(differences[env::ENVS]) for env in range(ENVS)])) < ALPHA


def _unchanged(rng: Rng, band: tuple[float, float], n_tasks: int, attempts: int) -> Rates:
    chances = draw_chances(rng, rng.uniform(*band), n_tasks)
    after, before = rng.binomial(attempts, chances), rng.binomial(attempts, chances)
    return np.asarray((after - before) / attempts)


def _p_value(differences: Rates) -> float:
    """For single attempts it is McNemar's test; with fewer draws than a comparison makes."""
    return sign_flip(differences.tolist(), n_draws=5000)


def false_best(rng: Rng, band: tuple[float, float], n_tasks: int, attempts: int) -> bool:
    """Nothing changed in 20 evaluations after the first; is another the best?"""
    chances = draw_chances(rng, rng.uniform(*band), n_tasks)
    reports = [_report(rng, chances, attempts, step=step) for step in range(LOOKS + 1)]
    return best_step(reports).step != 0


def _report(rng: Rng, chances: Rates, attempts: int, *, step: int = 0) -> EvalReport:
    outcomes = {
        str(task): TaskOutcome(
            env_key="all",
            successes=passed,
            rewards=(1.0,) * passed + (0.0,) * (attempts - passed),
        )
        for task, passed in enumerate(rng.binomial(attempts, chances).tolist())
    }
    return replace(_EMPTY, step=step, outcomes=outcomes)


def _holds(truth: float, interval: Interval) -> bool:
    return interval[0] <= truth <= interval[1]


Simulation = Callable[[Rng, tuple[float, float], int, int], bool]


def share(
    simulate: Simulation, band: tuple[float, float], n_tasks: int, attempts: int, *, trials: int
) -> float:
    rng = np.random.default_rng([n_tasks, attempts])
    return sum(simulate(rng, band, n_tasks, attempts) for _ in range(trials)) / trials


def print_table(
    title: str,
    simulate: Simulation,
    trials: int,
    *,
    bands: Sequence[str] = ("0.1 to 0.9",),
    sizes: Sequence[int] = SIZES,
    attempts: Sequence[int] = ATTEMPTS,
) -> None:
    print(f"\n{title}; {trials} trials a cell\n")
    print("| rates | tasks |", *(f" k = {k} |" for k in attempts), sep="")
    print("|---|--:|", "--:|" * len(attempts), sep="")
    for band in bands:
        for n_tasks in sizes:
            cells = (share(simulate, BANDS[band], n_tasks, k, trials=trials) for k in attempts)
            shown = "".join(f" {100 * cell:.1f} |" for cell in cells)
            print(f"| {band} | {n_tasks} |{shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000, help="evaluations a cell")
    trials: int = parser.parse_args().trials
    print(
        f"`python benchmarks/intervals.py --trials {trials}` on {date.today()}: "
        f"numpy {np.__version__}, scipy {scipy.__version__}; k attempts at a task."
    )
    everywhere = list(BANDS)
    print_table("Coverage of a report's interval, %", one_report_holds, trials, bands=everywhere)
    print_table("Coverage of a difference, %", difference_holds, trials, bands=everywhere)
    print_table("False verdicts on a set, %", false_alarm, trials)
    print_table(f"False verdicts on any of {ENVS} environments, %", false_alarm_anywhere, trials)
    looks = f"False best step in {LOOKS} evaluations, %"
    print_table(looks, false_best, trials // 5, sizes=(20, 60, 200), attempts=(1, 4))


if __name__ == "__main__":
    main()
