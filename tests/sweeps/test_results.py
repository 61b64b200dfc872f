"""Results of a sweep: paired verdicts, Holm's correction, data scaling, one page."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.sweeps.scripted_runs import (
    LR,
    N_TASKS,
    ScriptedRunner,
    plan_small,
    write_config,
)

from skyfleet.evaluation.compare import Verdict
from skyfleet.metrics.significance import holm, mcnemar_exact
from skyfleet.sweeps.execution import run_sweep
from skyfleet.sweeps.page import PAGE, build_page, write_page
from skyfleet.sweeps.plan import SweepPlan, SweepRun
from skyfleet.sweeps.record import read_record
from skyfleet.sweeps.results import SweepResults, read_results
from skyfleet.sweeps.tables import format_plan, format_results


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, monkeypatch)


def run(plan: SweepPlan, runner: ScriptedRunner) -> SweepResults:
    plan.folder.mkdir(parents=True, exist_ok=True)
    run_sweep(plan, runner, lambda _: None)
    return read_results(plan, read_record(plan.folder))


def test_every_setting_is_compared_with_the_baseline_and_corrected_for_their_number() -> None:
    gains = {"1e-2": 10, "1e-3": 17, "1e-4": 40}  # of the 60 tasks; the baseline passes ten
    plan = plan_small(f"{LR}=1e-2,1e-3,1e-4", n_seeds=1)
    results = run(plan, ScriptedRunner(passes=lambda one: gains[one.variant.settings[0][1]]))
    small, large = results.verdicts
    p_values = [mcnemar_exact(7, 0), mcnemar_exact(30, 0)]
    assert p_values[0] == pytest.approx(0.0156, abs=1e-4)
    corrected = holm(p_values)
    assert [one.compared.change.corrected_p_value for one in (small, large)] == corrected
    assert small.compared.change.verdict is Verdict.IMPROVED
    assert large.baseline.label == "lr=1e-2"
    assert large.compared.change.difference == pytest.approx(30 / N_TASKS)
    text = format_results(results)
    assert "| val | lr=1e-4 | lr=1e-2  |    60 |     1 | 16.7 %          | 66.7 % | +50.0 " in text
    assert "corrected over all 2 comparisons of an evaluation set (Holm)" in " ".join(text.split())


def test_comparisons_that_are_still_missing_count_in_the_correction() -> None:
    """Otherwise IMPROVED could become NO EVIDENCE when the last run ends."""
    values = ["1e-2", "1e-3", "1e-4", "1e-5", "1e-6"]
    plan = plan_small(f"{LR}={','.join(values)}", n_seeds=1)
    failing = {one.name for one in plan.runs[2:]}
    runner = ScriptedRunner(
        passes=lambda one: 10 if one.variant.settings[0][1] == "1e-2" else 17, failing=failing
    )
    results = run(plan, runner)
    (only,) = results.verdicts
    assert only.compared.change.corrected_p_value == pytest.approx(4 * mcnemar_exact(7, 0))
    assert only.compared.change.verdict is not Verdict.IMPROVED
    assert [one.run.name for one in results.failed] == [one.name for one in plan.runs[2:]]


def test_sizes_are_compared_with_the_smallest_and_settings_at_the_same_size() -> None:
    plan = plan_small(f"{LR}=1e-2,1e-3", data_sizes="2,4")

    def passes(one: SweepRun) -> int:
        assert one.variant.data_size is not None
        return 10 * one.variant.data_size + (5 if one.variant.settings[0][1] == "1e-3" else 0)

    results = run(plan, ScriptedRunner(passes=passes))
    pairs = [(one.variant.label, one.baseline.label) for one in results.verdicts]
    assert pairs == [
        ("lr=1e-3, 2 tasks", "lr=1e-2, 2 tasks"),
        ("lr=1e-3, 4 tasks", "lr=1e-2, 4 tasks"),
        ("lr=1e-2, 4 tasks", "lr=1e-2, 2 tasks"),
        ("lr=1e-3, 4 tasks", "lr=1e-3, 2 tasks"),
    ]
    scores = [one.score("val") for one in results.variants]
    assert [round(60 * one.rate) for one in scores if one] == [20, 40, 25, 45]
    page = build_page(results)
    assert "Performance against the number of training tasks" in page
    assert "tasks 2: 33.3" in page, "a point of the scaling chart"
    assert "tasks 4: 66.7" in page


def test_the_page_shows_failures_curves_and_links_and_escapes_what_runs_wrote() -> None:
    plan = plan_small(f"{LR}=1e-2,1e-3")
    failing = ScriptedRunner(passes=lambda _: 20, failing={plan.runs[3].name})
    results = run(plan, failing)
    record = read_record(plan.folder)
    wrong = record.get(plan.runs[3].name).model_copy(update={"error": "<script>alert(1)</script>"})
    record.runs[plan.runs[3].name] = wrong
    results = read_results(plan, record)
    write_page(results)
    page = (plan.folder / PAGE).read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert f'href="{plan.runs[0].name}/report.html"' in page
    assert f'href="{plan.runs[3].name}/report.html"' not in page
    assert "3 of 4 runs finished, 1 failed" in page
    assert "step 0: 16.7" in page
    assert (plan.folder / "results.md").read_text() == format_results(results)


def test_a_page_can_be_written_before_any_run_has_finished() -> None:
    plan = plan_small(f"{LR}=1e-2,1e-3")
    results = read_results(plan, read_record(plan.folder))
    assert "There is nothing to compare yet." in build_page(results)
    assert "| val | lr=1e-2" in format_results(results)


def test_the_plan_lists_runs_with_their_episodes_and_estimates_the_rest_from_finished_runs() -> (
    None
):
    plan = plan_small(f"{LR}=1e-2,1e-3", n_seeds=1)
    text = format_plan(plan, read_record(plan.folder))
    # 3 steps x 2 tasks x 4 attempts; evaluations of 3 tasks at steps 0, 2 and 3.
    assert "|   42 |     4 |     3 |       24 |          9 | waiting |" in text
    assert "2 runs: 48 training and 18 evaluation episodes." in text
    assert "The time is known after the first run." in text
    run(plan, ScriptedRunner(passes=lambda _: 20, failing={plan.runs[1].name}))
    record = read_record(plan.folder)
    first = plan.runs[0].name
    record.runs[first] = record.get(first).model_copy(update={"seconds": 600.0})
    assert "What is left takes about 10 minutes" in format_plan(plan, record)
