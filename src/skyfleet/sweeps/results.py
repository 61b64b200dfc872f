"""Results of a sweep: scores of every variant over tasks and seeds, and verdicts against the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from skyfleet.analysis.run_folder import open_run
from skyfleet.errors import SkyfleetError, TaskError
from skyfleet.evaluation.compare_seeds import (
    SeedChange,
    SeedScore,
    compare_over_seeds,
    score_over_seeds,
)
from skyfleet.evaluation.report import EvalReport
from skyfleet.metrics.significance import holm
from skyfleet.sweeps.grid import Grid, Variant
from skyfleet.sweeps.plan import SweepPlan, SweepRun
from skyfleet.sweeps.record import RunRecord, State, SweepRecord, find_state

RunReports = Mapping[str, Mapping[int, EvalReport]]
"""By evaluation set, then by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    run: SweepRun
    state: State
    record: RunRecord
    reports: RunReports
    """Empty unless the run is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    variant: Variant
    label: str
    runs: tuple[RunResult, ...]

    @property
    def n_tasks(self) -> int | None:
        return self.runs[0].run.n_tasks

    @property
    def steps(self) -> list[int]:
        """The last steps of the finished runs."""
        return sorted({step for one in self.runs if (step := _last_step(one.reports)) is not None})

    def last_reports(self, set_name: str) -> dict[int, EvalReport]:
        """By seed, at the end of each finished run."""
        return {
            one.run.seed: by_step[max(by_step)]
            for one in self.runs
            if (by_step := one.reports.get(set_name))
        }

    def score(self, set_name: str) -> SeedScore | None:
        return _score(self.last_reports(set_name))

    def curve(self, set_name: str) -> list[tuple[int, SeedScore]]:
        """The score at every step that all finished runs evaluated."""
        by_seed = {
            one.run.seed: by_step for one in self.runs if (by_step := one.reports.get(set_name))
        }
        steps = [set(by_step) for by_step in by_seed.values()]
        common = sorted(set.intersection(*steps)) if steps else []
        points = (
            (step, _score({seed: by_step[step] for seed, by_step in by_seed.items()}))
            for step in common
        )
        return [(step, score) for step, score in points if score is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepVerdict:
    set_name: str
    baseline: VariantResult
    variant: VariantResult
    compared: SeedChange
    """Its p-value is corrected over the comparisons of the set (Holm)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResults:
    plan: SweepPlan
    variants: tuple[VariantResult, ...]
    """The baseline first."""
    verdicts: tuple[SweepVerdict, ...]
    notes: tuple[str, ...]
    """One sentence per run that cannot be read and per comparison that is not possible."""

    @property
    def set_names(self) -> list[str]:
        return list(self.plan.runs[0].config.data.eval_sets)

    @property
    def runs(self) -> list[RunResult]:
        """In the order of the plan."""
        found = {one.run.name: one for variant in self.variants for one in variant.runs}
        return [found[run.name] for run in self.plan.runs]

    @property
    def failed(self) -> list[RunResult]:
        return [one for one in self.runs if one.state == "failed"]

    @property
    def n_comparisons(self) -> int:
        """Of each set."""
        return len(list(pair_variants(self.plan.grid, self.variants)))


def read_results(plan: SweepPlan, record: SweepRecord) -> SweepResults:
    notes: list[str] = []
    variants = tuple(
        VariantResult(
            variant=variant,
            label=plan.grid.describe(variant),
            runs=tuple(
                _read_run(run, record, notes) for run in plan.runs if run.variant == variant
            ),
        )
        for variant in plan.grid.variants
    )
    set_names = list(plan.runs[0].config.data.eval_sets)
    pairs = list(pair_variants(plan.grid, variants))
    verdicts = [verdict for name in set_names for verdict in _judge_set(name, pairs, notes)]
    return SweepResults(
        plan=plan, variants=variants, verdicts=tuple(verdicts), notes=tuple(dict.fromkeys(notes))
    )


def pair_variants(
    grid: Grid, variants: Sequence[VariantResult]
) -> Iterator[tuple[VariantResult, VariantResult]]:
    """Baseline and variant: settings at the same data size, and sizes with the same settings."""
    by_variant = {one.variant: one for one in variants}
    for one in variants:
        settings, size = one.variant.settings, one.variant.data_size
        if settings != grid.baseline:
            yield by_variant[Variant(settings=grid.baseline, data_size=size)], one
    for one in variants:
        settings, size = one.variant.settings, one.variant.data_size
        if size is not None and size != grid.data_sizes[0]:
            yield by_variant[Variant(settings=settings, data_size=grid.data_sizes[0])], one


def _judge_set(
    set_name: str,
    pairs: Sequence[tuple[VariantResult, VariantResult]],
    notes: list[str],
) -> list[SweepVerdict]:
    found: list[SweepVerdict] = []
    for baseline, variant in pairs:
        before, after = baseline.last_reports(set_name), variant.last_reports(set_name)
        if not before or not after:
            continue  # the table of runs shows why
        try:
            compared = compare_over_seeds(before, after)
        except TaskError as error:
            notes.append(f"{set_name}: {variant.label} against {baseline.label}: {error}.")
            continue
        found.append(
            SweepVerdict(set_name=set_name, baseline=baseline, variant=variant, compared=compared)
        )
    # Also the comparisons that are still missing count, or a verdict could change when they come.
    missing = [1.0] * (len(pairs) - len(found))
    corrected = holm([*(one.compared.change.p_value for one in found), *missing])
    return [
        replace(one, compared=_with_p(one.compared, p_value))
        for one, p_value in zip(found, corrected, strict=False)
    ]


def _with_p(compared: SeedChange, p_value: float) -> SeedChange:
    return replace(compared, change=replace(compared.change, corrected_p_value=p_value))


def _read_run(run: SweepRun, record: SweepRecord, notes: list[str]) -> RunResult:
    state = find_state(run, record)
    reports: RunReports = {}
    if state == "finished":
        try:
            reports = open_run(run.folder).reports()
        except SkyfleetError as error:
            notes.append(f"{run.name} cannot be read: {error}.")
    return RunResult(run=run, state=state, record=record.get(run.name), reports=reports)


def _score(reports: Mapping[int, EvalReport]) -> SeedScore | None:
    try:
        return score_over_seeds(reports) if reports else None
    except TaskError:
        return None


def _last_step(reports: RunReports) -> int | None:
    return max((step for by_step in reports.values() for step in by_step), default=None)
