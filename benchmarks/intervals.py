"""How often intervals hold and verdicts are false: simulated evaluations whose truth is known.

A task's own chance of success is drawn from a beta distribution around the set's rate, which is
itself drawn from a band: single rates make every interval of counts jump up and down around its
coverage, the mean over a band does not. Where a share of the tasks flips, these go from nearly
never passing to nearly always, and the others stay at never.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date

import numpy as np
import numpy.typing as npt
import scipy

from skyfleet.evaluation.best import ALPHA, best_step
from skyfleet.evaluation.pairs import difference_and_p, pair_tasks
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import TaskOutcome
from skyfleet.metrics.intervals import Interval, mean_rate, paired_difference, wilson
from skyfleet.metrics.significance import holm, sign_flip

SIZES = (10, 20, 50, 100, 200, 500)
ATTEMPTS = (1, 2, 4, 8)
Band = tuple[float, float]
MIDDLE: Mapping[str, Band] = {"0.1 to 0.9": (0.1, 0.9)}
LOW: Mapping[str, Band] = {"0.02 to 0.1": (0.02, 0.1)}
HIGH: Mapping[str, Band] = {"0.9 to 0.98": (0.9, 0.98)}
FLIPS: Mapping[str, Band] = {
    f"{100 * share:.0f} % flip": (share, share) for share in (0.05, 0.1, 0.2)
}
NEVER, ALWAYS = 0.01, 0.98
CONCENTRATION = 2.0
"""Of the beta distribution: many tasks nearly always pass or nearly never do."""
LOOKS = 20
ENVS = 4

Rng = np.random.Generator
Rates = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
_EMPTY = EvalReport.of("simulated", [], step=0)


def draw_chances(rng: Rng, rate: float, n_tasks: int) -> Rates:
    return rng.beta(CONCENTRATION * rate, CONCENTRATION * (1 - rate), n_tasks)


def draw_flipped(rng: Rng, share: Band, n_tasks: int) -> Rates:
    return np.where(rng.random(n_tasks) < share[0], ALWAYS, NEVER)


def one_report_holds(rng: Rng, band: Band, n_tasks: int, attempts: int) -> bool:
    rate = rng.uniform(*band)
    rates = rng.binomial(attempts, draw_chances(rng, rate, n_tasks)) / attempts
    return _holds(rate, interval_of(rates.tolist(), attempts))


def report_of_flips_holds(rng: Rng, share: Band, n_tasks: int, attempts: int) -> bool:
    rates = rng.binomial(attempts, draw_flipped(rng, share, n_tasks)) / attempts
    truth = NEVER + share[0] * (ALWAYS - NEVER)
    return _holds(truth, interval_of(rates.tolist(), attempts))


def interval_of(rates: Sequence[float], attempts: int) -> Interval:
    """As a report has it."""
    return mean_rate(rates) if attempts > 1 else wilson(sum(rates) / len(rates), len(rates))


def difference_of_flips_holds(rng: Rng, share: Band, n_tasks: int, attempts: int) -> bool:
    after = rng.binomial(attempts, draw_flipped(rng, share, n_tasks))
    differences = (after - rng.binomial(attempts, NEVER, n_tasks)) / attempts
    return _holds(share[0] * (ALWAYS - NEVER), paired_difference(differences.tolist()))


def difference_holds(rng: Rng, band: Band, n_tasks: int, attempts: int) -> bool:
    """Half of the time nothing changes; otherwise up to 30 % of what is missing is gained."""
    rate = rng.uniform(*band)
    gain = rng.choice([0.0, rng.uniform(0, 0.3)])
    chances = draw_chances(rng, rate, n_tasks)
    eased = chances + gain * (1 - chances)
    differences = (rng.binomial(attempts, eased) - rng.binomial(attempts, chances)) / attempts
    return _holds(gain * (1 - rate), paired_difference(differences.tolist()))


def false_alarm(rng: Rng, band: Band, n_tasks: int, attempts: int) -> bool:
    """Nothing changed; is the set said to have?"""
    return _p_value(_unchanged(rng, band, n_tasks, attempts)) < ALPHA


def false_alarm_anywhere(rng: Rng, band: Band, n_tasks: int, attempts: int) -> bool:
    """Nothing changed; is any of its four environments said to have?"""
    differences = _unchanged(rng, band, n_tasks, attempts)
    return min(holm([_p_value(differences[env::ENVS]) for env in range(ENVS)])) < ALPHA


def _unchanged(rng: Rng, band: Band, n_tasks: int, attempts: int) -> Rates:
    chances = draw_chances(rng, rng.uniform(*band), n_tasks)
    after, before = rng.binomial(attempts, chances), rng.binomial(attempts, chances)
    return np.asarray((after - before) / attempts)


def _p_value(differences: Rates) -> float:
    """For single attempts it is McNemar's test."""
    return sign_flip(differences.tolist())


def false_alarm_of_one(rng: Rng, band: Band, n_tasks: int, attempts: int) -> bool:
    """Nothing changed, and tasks of one rate were tried once before and k times after."""
    return _uneven_alarm(rng, band, np.ones(n_tasks, dtype=np.int64), attempts)


def false_alarm_of_half(rng: Rng, band: Band, n_tasks: int, attempts: int) -> bool:
    """Nothing changed, and of k attempts at tasks of one rate half have no grade before."""
    return _uneven_alarm(rng, band, np.maximum(1, rng.binomial(attempts, 0.5, n_tasks)), attempts)


def _uneven_alarm(rng: Rng, band: Band, before: Counts, attempts: int) -> bool:
    chances = np.full(len(before), rng.uniform(*band))
    reports = _report(rng, chances, before), _report(rng, chances, attempts)
    return difference_and_p(pair_tasks(*reports))[1] < ALPHA


def false_best(rng: Rng, band: Band, n_tasks: int, attempts: int) -> bool:
    """Nothing changed in 20 evaluations after the first; is another the best?"""
    chances = draw_chances(rng, rng.uniform(*band), n_tasks)
    reports = [_report(rng, chances, attempts, step=step) for step in range(LOOKS + 1)]
    return best_step(reports).step != 0


def _report(rng: Rng, chances: Rates, attempts: int | Counts, *, step: int = 0) -> EvalReport:
    tried = np.broadcast_to(attempts, len(chances)).tolist()
    passes = rng.binomial(attempts, chances).tolist()
    outcomes = {
        str(task): TaskOutcome(
            env_key="all", successes=passed, rewards=(1.0,) * passed + (0.0,) * (tries - passed)
        )
        for task, (passed, tries) in enumerate(zip(passes, tried, strict=True))
    }
    return replace(_EMPTY, step=step, outcomes=outcomes)


def _holds(truth: float, interval: Interval) -> bool:
    return interval[0] <= truth <= interval[1]


Simulation = Callable[[Rng, Band, int, int], bool]


def share(simulate: Simulation, band: Band, n_tasks: int, attempts: int, *, trials: int) -> float:
    rng = np.random.default_rng([n_tasks, attempts])
    return sum(simulate(rng, band, n_tasks, attempts) for _ in range(trials)) / trials


def print_table(
    title: str,
    simulate: Simulation,
    trials: int,
    *,
    bands: Mapping[str, Band] = MIDDLE,
    sizes: Sequence[int] = SIZES,
    attempts: Sequence[int] = ATTEMPTS,
) -> None:
    print(f"\n{title}; {trials} trials a cell\n")
    print("| rates | tasks |", *(f" k = {k} |" for k in attempts), sep="")
    print("|---|--:|", "--:|" * len(attempts), sep="")
    for name, band in bands.items():
        for n_tasks in sizes:
            cells = (share(simulate, band, n_tasks, k, trials=trials) for k in attempts)
            shown = "".join(f" {100 * cell:.1f} |" for cell in cells)
            print(f"| {name} | {n_tasks} |{shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000, help="evaluations a cell")
    trials: int = parser.parse_args().trials
    print(
        f"`python benchmarks/intervals.py --trials {trials}` on {date.today()}: "
        f"numpy {np.__version__}, scipy {scipy.__version__}; k attempts at a task."
    )
    everywhere = {**MIDDLE, **LOW, **HIGH}
    few = SIZES[:4]
    print_table("Coverage of a report's interval, %", one_report_holds, trials, bands=everywhere)
    title = "Coverage of a report's interval where some tasks always pass, %"
    print_table(title, report_of_flips_holds, trials, bands=FLIPS, sizes=few)
    print_table("Coverage of a difference, %", difference_holds, trials, bands=everywhere)
    title = "Coverage of a difference where some tasks flip, %"
    print_table(title, difference_of_flips_holds, trials, bands=FLIPS, sizes=few)
    print_table("False verdicts on a set, %", false_alarm, trials)
    print_table(f"False verdicts on any of {ENVS} environments, %", false_alarm_anywhere, trials)
    title = "False verdicts where a set was tried once before and k times after, %"
    ends = {**MIDDLE, **HIGH}
    print_table(title, false_alarm_of_one, trials, bands=ends, sizes=few, attempts=(2, 4, 8))
    title = "False verdicts where half of the k attempts before have no grade, %"
    print_table(title, false_alarm_of_half, trials, bands=ends, sizes=few, attempts=(2, 4, 8))
    looks = f"False best step in {LOOKS} evaluations, %"
    print_table(looks, false_best, trials // 5, sizes=(20, 60, 200), attempts=(1, 4))


if __name__ == "__main__":
    main()
