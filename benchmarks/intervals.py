"""Coverage of the intervals and rate of false verdicts, on simulated evaluations.

The success probability of a task is drawn from a beta distribution around the rate of the set,
which is drawn from a range: at a single rate the coverage of an interval of counts jumps around its
mean. In the simulations with flips, a share of the tasks goes from nearly never passing to nearly
always, and the others stay at never; with swaps, as many tasks go the other way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from statistics import fmean

import numpy as np
import numpy.typing as npt
import scipy
from scipy.special import stdtrit

from skyfleet.evaluation.compare import difference_and_p, pair_tasks
from skyfleet.evaluation.model_selection import ALPHA, select_best_step
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import TaskOutcome
from skyfleet.metrics.intervals import (
    Interval,
    cluster_bootstrap,
    mean_rate,
    paired_difference,
    wilson,
)
from skyfleet.metrics.significance import holm, sign_flip

SIZES = (10, 20, 50, 100, 200, 500)
FEW, MANY = SIZES[:4], SIZES[3:]
ATTEMPTS = (1, 2, 4, 8)
Band = tuple[float, float]
MIDDLE: Mapping[str, Band] = {"0.1 to 0.9": (0.1, 0.9)}
LOW: Mapping[str, Band] = {"0.02 to 0.1": (0.02, 0.1)}
HIGH: Mapping[str, Band] = {"0.9 to 0.98": (0.9, 0.98)}
FLIPS, RARE_FLIPS = (
    {f"{100 * share:.0f} % flip": (share, share) for share in shares}
    for shares in ((0.05, 0.1, 0.2), (0.01, 0.02))
)
NEVER, ALWAYS = 0.01, 0.98
CONCENTRATION = 2.0
"""Of the beta distribution: many tasks nearly always pass or nearly never do."""
EVALUATIONS, ENVS = 20, 4

Rng = np.random.Generator
Rates = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Draw = Callable[[Rng, Band, int, int], tuple[Rates, float]]
"""The rates of k attempts at each task, and the true value."""
Method = Callable[[Sequence[float], int], Interval]
Simulation = Callable[[Rng, Band, int, int], bool]
Row = tuple[str, Band, int]
_EMPTY = EvalReport.from_groups("simulated", [], step=0)


def draw_chances(rng: Rng, rate: float, n_tasks: int) -> Rates:
    return rng.beta(CONCENTRATION * rate, CONCENTRATION * (1 - rate), n_tasks)


def draw_flipped(rng: Rng, share: float, n_tasks: int) -> Rates:
    return np.where(rng.random(n_tasks) < share, ALWAYS, NEVER)


def tried(rng: Rng, chances: Rates, attempts: int) -> Rates:
    return np.asarray(rng.binomial(attempts, chances) / attempts)


def rates(rng: Rng, band: Band, n_tasks: int, attempts: int) -> tuple[Rates, float]:
    rate = rng.uniform(*band)
    return tried(rng, draw_chances(rng, rate, n_tasks), attempts), rate


def rates_of_flips(rng: Rng, share: Band, n_tasks: int, attempts: int) -> tuple[Rates, float]:
    truth = NEVER + share[0] * (ALWAYS - NEVER)
    return tried(rng, draw_flipped(rng, share[0], n_tasks), attempts), truth


def scores(rng: Rng, band: Band, n_tasks: int, attempts: int) -> tuple[Rates, float]:
    """Partial credit: an attempt earns anything from 0 to 1, its task's own chance on average."""
    rate = rng.uniform(*band)
    chances = np.clip(draw_chances(rng, rate, n_tasks), 1e-6, 1 - 1e-6)
    earned = rng.beta(3 * chances, 3 * (1 - chances), (attempts, n_tasks))
    return np.asarray(earned.mean(axis=0)), rate


def differences(rng: Rng, band: Band, n_tasks: int, attempts: int) -> tuple[Rates, float]:
    """Half of the time nothing changes; otherwise up to 30 % of what is missing is gained."""
    rate = rng.uniform(*band)
    gain = float(rng.choice([0.0, rng.uniform(0, 0.3)]))
    chances = draw_chances(rng, rate, n_tasks)
    after = tried(rng, chances + gain * (1 - chances), attempts)
    return after - tried(rng, chances, attempts), gain * (1 - rate)


def differences_of_flips(rng: Rng, share: Band, n_tasks: int, attempts: int) -> tuple[Rates, float]:
    after = tried(rng, draw_flipped(rng, share[0], n_tasks), attempts)
    before = tried(rng, np.full(n_tasks, NEVER), attempts)
    return after - before, share[0] * (ALWAYS - NEVER)


def differences_of_swaps(rng: Rng, share: Band, n_tasks: int, attempts: int) -> tuple[Rates, float]:
    """As many tasks are lost as gained, so on the whole nothing changes."""
    chances = draw_flipped(rng, 0.5, n_tasks)
    swapped = rng.random(n_tasks) < 2 * share[0]
    after = tried(rng, np.where(swapped, ALWAYS + NEVER - chances, chances), attempts)
    return after - tried(rng, chances, attempts), 0.0


def of_report(values: Sequence[float], attempts: int) -> Interval:
    return mean_rate(values) if attempts > 1 else wilson(fmean(values), len(values))


def of_difference(values: Sequence[float], _: int) -> Interval:
    return paired_difference(values)


def of_bootstrap(values: Sequence[float], _: int) -> Interval:
    return cluster_bootstrap(values, n_resamples=1000)


def of_student(values: Sequence[float], _: int) -> Interval:
    half = stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


def holds(draw: Draw, method: Method) -> Simulation:
    def simulate(rng: Rng, band: Band, n_tasks: int, attempts: int) -> bool:
        values, truth = draw(rng, band, n_tasks, attempts)
        low, high = method(values.tolist(), attempts)
        return low <= truth <= high

    return simulate


report_holds = holds(rates, of_report)
report_of_flips_holds = holds(rates_of_flips, of_report)
score_holds = holds(scores, lambda values, _: mean_rate(values))
difference_holds = holds(differences, of_difference)
difference_of_flips_holds = holds(differences_of_flips, of_difference)
difference_of_swaps_holds = holds(differences_of_swaps, of_difference)


def interval_and_test_disagree(rng: Rng, band: Band, n_tasks: int, attempts: int) -> bool:
    """One finds a change and the other does not."""
    values, _ = differences(rng, band, n_tasks, attempts)
    low, high = paired_difference(values.tolist())
    return (low > 0 or high < 0) != (_p_value(values) < ALPHA)


def false_alarm(rng: Rng, band: Band, n_tasks: int, attempts: int) -> bool:
    """Nothing changed; is the set said to have?"""
    return _p_value(_unchanged(rng, band, n_tasks, attempts)) < ALPHA


def false_alarm_anywhere(rng: Rng, band: Band, n_tasks: int, attempts: int) -> bool:
    """Nothing changed; is any of its four environments said to have?"""
    values = _unchanged(rng, band, n_tasks, attempts)
    return min(holm([_p_value(values[env::ENVS]) for env in range(ENVS)])) < ALPHA


def _unchanged(rng: Rng, band: Band, n_tasks: int, attempts: int) -> Rates:
    chances = draw_chances(rng, rng.uniform(*band), n_tasks)
    return tried(rng, chances, attempts) - tried(rng, chances, attempts)


def _p_value(values: Rates) -> float:
    """For single attempts it is McNemar's test."""
    return sign_flip(values.tolist())


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
    reports = [_report(rng, chances, attempts, step=step) for step in range(EVALUATIONS + 1)]
    return select_best_step(reports).step != 0


def _report(rng: Rng, chances: Rates, attempts: int | Counts, *, step: int = 0) -> EvalReport:
    counts = np.broadcast_to(attempts, len(chances)).tolist()
    passes = rng.binomial(attempts, chances).tolist()
    outcomes = {
        str(task): TaskOutcome(
            env_key="all", successes=passed, rewards=(1.0,) * passed + (0.0,) * (tries - passed)
        )
        for task, (passed, tries) in enumerate(zip(passes, counts, strict=True))
    }
    return replace(_EMPTY, step=step, outcomes=outcomes)


def share(simulate: Simulation, band: Band, n_tasks: int, attempts: int, *, trials: int) -> float:
    rng = np.random.default_rng([n_tasks, attempts])
    return sum(simulate(rng, band, n_tasks, attempts) for _ in range(trials)) / trials


def rows_of(bands: Mapping[str, Band], sizes: Sequence[int] = SIZES) -> list[Row]:
    return [(name, band, n_tasks) for name, band in bands.items() for n_tasks in sizes]


def print_table(
    title: str,
    simulate: Simulation,
    trials: int,
    rows: Sequence[Row],
    attempts: Sequence[int] = ATTEMPTS,
) -> None:
    print(f"\n{title}; {trials} trials per cell\n")
    print("| rates | tasks |", *(f" k = {k} |" for k in attempts), sep="")
    print("|---|--:|", "--:|" * len(attempts), sep="")
    for name, band, n_tasks in rows:
        cells = [100 * share(simulate, band, n_tasks, k, trials=trials) for k in attempts]
        print(f"| {name} | {n_tasks} |", *(f" {cell:.1f} |" for cell in cells), sep="", flush=True)


def print_methods(trials: int) -> None:
    """The methods that were weighed, each on the same draws."""
    flips, middle = FLIPS["5 % flip"], MIDDLE["0.1 to 0.9"]
    cells: list[tuple[str, Draw, Method, Band, int]] = [
        ("report, 0.1 to 0.9", rates, of_report, middle, 50),
        ("report, 5 % flip", rates_of_flips, of_report, flips, 20),
        ("report, 5 % flip", rates_of_flips, of_report, flips, 50),
        ("difference, 0.1 to 0.9", differences, of_difference, middle, 50),
        ("difference, 5 % flip", differences_of_flips, of_difference, flips, 20),
        ("difference, 5 % flip", differences_of_flips, of_difference, flips, 50),
    ]
    print(f"\nCoverage of three methods, % (mean width, points); k = 8, {trials} trials per cell\n")
    print("| of | tasks | cluster bootstrap | Student's t | chosen |\n|---|--:|--:|--:|--:|")
    for name, draw, chosen, band, n_tasks in cells:
        methods = (of_bootstrap, of_student, chosen)
        shown = (_weighed(draw, method, band, n_tasks, trials) for method in methods)
        print(f"| {name} | {n_tasks} | {' | '.join(shown)} |", flush=True)


def _weighed(draw: Draw, method: Method, band: Band, n_tasks: int, trials: int) -> str:
    rng = np.random.default_rng(n_tasks)
    drawn = [draw(rng, band, n_tasks, 8) for _ in range(trials)]
    ends = [(*method(values.tolist(), 8), truth) for values, truth in drawn]
    covered = fmean(low <= truth <= high for low, high, truth in ends)
    return f"{100 * covered:.1f} ({100 * fmean(high - low for low, high, _ in ends):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000, help="evaluations per cell")
    trials: int = parser.parse_args().trials
    print(
        f"`python benchmarks/intervals.py --trials {trials}` on {date.today()}: "
        f"numpy {np.__version__}, scipy {scipy.__version__}; k attempts per task."
    )
    everywhere, middle = rows_of({**MIDDLE, **LOW, **HIGH}), rows_of(MIDDLE)
    flips = rows_of(FLIPS, FEW) + rows_of(RARE_FLIPS, MANY)
    print_table("Coverage of a report's interval, %", report_holds, trials, everywhere)
    title = "Coverage of a report's interval where some tasks always pass, %"
    print_table(title, report_of_flips_holds, trials, flips)
    print_table("Coverage of a difference, %", difference_holds, trials, everywhere)
    title = "Coverage of a difference where some tasks flip, %"
    print_table(title, difference_of_flips_holds, trials, flips)
    title = "Coverage of a difference where as many tasks are lost as gained, %"
    print_table(title, difference_of_swaps_holds, trials, flips)
    print_table("Coverage of a mean score with partial credit, %", score_holds, trials, middle)
    print_methods(trials)
    title = "Comparisons whose interval and test disagree, %"
    print_table(title, interval_and_test_disagree, trials, middle)
    print_table("False verdicts on a set, %", false_alarm, trials, middle)
    title = f"False verdicts on any of {ENVS} environments, %"
    print_table(title, false_alarm_anywhere, trials, middle)
    ends, several = rows_of({**MIDDLE, **HIGH}, FEW), ATTEMPTS[1:]
    title = "False verdicts where a set was tried once before and k times after, %"
    print_table(title, false_alarm_of_one, trials, ends, several)
    title = "False verdicts where half of the k attempts before have no grade, %"
    print_table(title, false_alarm_of_half, trials, ends, several)
    looks = f"False best step in {EVALUATIONS} evaluations, %"
    print_table(looks, false_best, trials // 5, rows_of(MIDDLE, (20, 60, 200)), (1, 4))


if __name__ == "__main__":
    main()
