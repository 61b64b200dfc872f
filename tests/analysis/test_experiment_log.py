"""The experiment entry says what a run's folder holds, also of a run that SkyRL made."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.small_runs import small_config
from tests.trajectories.making import attempt, call_turn, group

from skyfleet.analysis.advice import suggest_next_steps
from skyfleet.analysis.before_after import BehaviourChange
from skyfleet.analysis.dump_import import import_dumps
from skyfleet.analysis.experiment_log import experiment_entry
from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.formatting import NOTHING
from skyfleet.analysis.run_folder import open_run
from skyfleet.config.keys import dump_yaml
from skyfleet.errors import ConfigError
from skyfleet.evaluation.compare import compare
from skyfleet.evaluation.report import EvalReport
from skyfleet.trajectories.archive import eval_path, train_path, write_groups
from skyfleet.trajectories.entry import index_path
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Group

OLD = Path(__file__).parents[1] / "assets" / "dumped_evals"


def evaluated(run: Path, step: int, rewards: list[float]) -> None:
    groups = [
        Group(
            task_key=f"t{number}",
            env_key="github",
            trajectories=(attempt(r, task_key=f"t{number}", turns=(call_turn(),) * (1 + step)),),
        )
        for number, r in enumerate(rewards)
    ]
    write_groups(eval_path(run / "trajectories", "unseen", step), groups)
    folder = run / "reports" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "unseen.json").write_text(
        EvalReport.from_groups("unseen", groups, step=step).to_json()
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    evaluated(folder, 0, [0.0] * 10)
    evaluated(folder, 2, [1.0] * 8 + [0.0] * 2)
    trained = [group([1.0, 1.0], task_key="a"), group([1.0, 0.0], task_key="b")]
    write_groups(train_path(folder / "trajectories", 1), trained)
    (folder / "config.yaml").write_text(dump_yaml(small_config(folder)))
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 2}\n')
    return folder


def sections(entry: str) -> dict[str, str]:
    title, *rest = entry.split("\n## ")
    assert title.startswith("# ")
    return dict(section.split("\n\n", 1) for section in rest)


def row(text: str, *cells: str) -> bool:
    """A line of the table begins with these cells."""
    lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines())
    return any(line[: len(cells)] == list(cells) for line in lines)


def test_the_entry_has_every_section_with_its_numbers(run: Path) -> None:
    found = sections(experiment_entry(open_run(run)))
    assert not open_run(run).imported
    assert list(found) == [
        "Dataset",
        "Method",
        "Results",
        "Behaviour",
        "Training signal",
        "Error patterns",
        "What to do next",
    ]
    assert row(found["Dataset"], "training", "github", "2", "4")
    assert row(found["Dataset"], "unseen", "github", "10", "20")
    assert row(found["Method"], "steps", "2, after 3 of warm start")
    assert row(found["Method"], "batch", "2 tasks x 4 attempts")
    assert row(found["Results"], "unseen", "github", "10", "0.0 %", "80.0 %", "+80.0")
    assert row(found["Behaviour"], "unseen", "github", "1.00 → 3.00 *", "1.00 → 3.00 *")
    assert row(found["Training signal"], "github", "0.1250", "100 %", "50 %", "50 %", "2 of 4")
    (errors,) = [line for line in found["Error patterns"].splitlines() if "eval/unseen/2/8" in line]
    assert "100 %" in errors
    assert (
        "- github: 50 % of groups have mixed outcomes (pass rate 0.75), good learning signal."
        in found["What to do next"]
    )


def test_a_run_without_steps_has_an_entry(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.yaml").write_text((run / "config.yaml").read_text())
    found = sections(experiment_entry(open_run(new)))
    assert found["Results"].strip() == "Not evaluated at two steps that can be compared."
    assert found["What to do next"].strip() == "No suggestions."


def test_a_set_without_two_graded_steps_is_left_out_of_the_results(run: Path) -> None:
    ungraded = EvalReport.from_groups("odd", [group([None], task_key="t0")], step=0)
    for step in (0, 2):
        path = run / "reports" / f"step_{step:06d}" / "odd.json"
        path.write_text(replace(ungraded, step=step).to_json())
    found = sections(experiment_entry(open_run(run)))
    assert row(found["Results"], "unseen", "github", "10")
    assert "odd" not in found["Results"]


def test_the_next_steps_start_with_regressions() -> None:
    lost = compare(_report([1.0] * 12, 0), _report([0.0] * 12, 9))
    torn = BehaviourChange(
        env_key="github",
        quantity="malformed calls",
        n_tasks=12,
        before=0.0,
        after=2.0,
        difference=2.0,
        interval=(1.5, 2.5),
    )
    rare = replace(torn, difference=0.1, interval=(0.05, 0.2))
    failures = {FailureClass.CONTEXT_OVERFLOW: 8, FailureClass.LOOP: 2}
    assert suggest_next_steps({}, [lost], {"unseen": [torn], "other": [rare]}, failures) == [
        "github in unseen regressed; read the lost tasks first.",
        "unseen: malformed calls per episode increased in github (0.0 to 2.0); "
        "compare episodes with `skyfleet diff`.",
        "80 % of the failures are context overflow; "
        "raise generator.max_input_length or max_generate_length.",
    ]


def test_the_entry_lists_damaged_files(run: Path) -> None:
    assert "Skipped" not in experiment_entry(open_run(run))
    cut = eval_path(run / "trajectories", "unseen", 2)
    cut.write_bytes(cut.read_bytes()[:-20])
    unread = train_path(run / "trajectories", 1)
    unread.write_bytes(b"no gzip")
    index_path(unread).unlink()
    found = sections(experiment_entry(open_run(run)))
    assert (
        f"Skipped: {cut} ends before eval/unseen/2/0: 10 episodes are missing" in found["Dataset"]
    )
    assert f"Skipped: {unread} at byte 0: " in found["Dataset"]
    assert found["Dataset"].count("Skipped: ") == 2
    assert found["Error patterns"].strip() == "No failures."


def _report(rewards: list[float], step: int) -> EvalReport:
    groups = [group([reward], task_key=f"t{n}") for n, reward in enumerate(rewards)]
    return EvalReport.from_groups("unseen", groups, step=step)


def test_skyrl_dumps_are_imported_as_a_run_folder(tmp_path: Path) -> None:
    import_dumps(OLD, tmp_path / "old")
    run = open_run(tmp_path / "old")
    assert [entry.id for entry in run.entries()] == [
        *(f"eval/val/0/{number}" for number in range(4)),
        "eval/val/20/0",
        "eval/val/20/1",
    ]
    assert run.reports()["val"][20].overall.success_rate == 1.0
    found = sections(experiment_entry(run))
    assert row(found["Results"], "val", "github", "2", "25.0 %", "100.0 %")
    assert run.imported
    assert found["Method"].startswith("Not recorded")
    assert "not recorded" in found["Dataset"]
    (behaviour,) = [line for line in found["Behaviour"].splitlines() if "github" in line]
    assert behaviour.rstrip(" |").endswith(NOTHING)
    with pytest.raises(ConfigError, match="exists; name a new folder"):
        import_dumps(OLD, tmp_path / "old")


def test_a_folder_without_dumps_raises_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no global_step_N_evals"):
        import_dumps(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_failed_import_leaves_no_files(tmp_path: Path) -> None:
    dumps = tmp_path / "dumped_evals"
    shutil.copytree(OLD, dumps)
    broken = dumps / "global_step_20_evals" / "github.jsonl"
    whole = broken.read_text()
    broken.write_text("{")
    with pytest.raises(RecordError, match=r"github\.jsonl line 1"):
        import_dumps(dumps, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dumped_evals"]
    broken.write_text(whole)
    import_dumps(dumps, tmp_path / "run")
    assert len(open_run(tmp_path / "run").entries()) == 6


def test_an_invalid_line_or_folder_is_named_in_the_error(run: Path) -> None:
    folder = open_run(run)
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": \n')
    with pytest.raises(RecordError, match=r"metrics\.jsonl line 2: .*remove the line"):
        folder.metrics()
    (run / "metrics.jsonl").write_text("3\n")
    with pytest.raises(RecordError, match=r"metrics\.jsonl line 1: not a row of metrics"):
        folder.metrics()
    best = run / "reports" / "step_best"
    best.mkdir()
    (best / "unseen.json").write_text("{}")
    with pytest.raises(RecordError, match="step_best has no step number"):
        folder.reports()
    best.rename(run / "reports" / "step_000009")
    with pytest.raises(RecordError, match=r"step_000009/unseen\.json: .*"):
        folder.reports()


def test_control_characters_in_names_are_escaped(run: Path) -> None:
    odd = [group([1.0, 0.0], task_key="a", env_key="\x1b[2Jgithub")]
    write_groups(train_path(run / "trajectories", 2), odd)
    entry = experiment_entry(open_run(run))
    assert "\x1b" not in entry
    assert r"- \x1b[2Jgithub: " in entry
