"""`skyfleet compare` prints the comparison; a regression is an error only on request."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from tests.trajectories.making import group
from typer.testing import CliRunner, Result

from skyfleet.cli.compare import compare_command
from skyfleet.errors import ConfigError, TaskError
from skyfleet.evaluation.agent_info import AgentInfo
from skyfleet.evaluation.report import EvalReport

PUBLISHED = Path(__file__).parents[2] / "examples" / "published_rates.yaml"

app = typer.Typer()
app.command()(compare_command)


def run(*args: Path | str) -> Result:
    return CliRunner().invoke(app, [str(word) for word in args], catch_exceptions=False)


def save_report(folder: Path, step: int, name: str, rewards: list[float | None]) -> None:
    groups = [group([reward], task_key=f"t{i}") for i, reward in enumerate(rewards)]
    path = folder / "reports" / f"step_{step:06d}" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(EvalReport.from_groups(name, groups, step=step).to_json())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    save_report(tmp_path / "better", 0, "unseen", [0.0] * 12)
    save_report(tmp_path / "better", 40, "unseen", [1.0] * 11 + [None])
    save_report(tmp_path / "better", 40, "late", [1.0])
    save_report(tmp_path / "worse", 0, "unseen", [0.0] * 12)
    return tmp_path


def test_a_run_is_compared_with_its_first_evaluation(runs: Path) -> None:
    result = run(runs / "better")
    assert result.exit_code == 0
    assert "| unseen | github      |    11 |  0.0 % | 100.0 % |     +100.0 |" in result.output
    assert result.output.endswith(
        "\nunseen: IMPROVED: github. Overall +100.0 points on 11 tasks, p = 0.00098: IMPROVED.\n"
        "late exists on one side only.\n"
        "Excluded, because they are not graded on both sides: 1 tasks.\n"
    )


def test_a_regression_exits_with_1_only_on_request(runs: Path) -> None:
    assert run(runs / "better", runs / "worse").exit_code == 0
    failed = run(runs / "better", runs / "worse", "--fail-on-regression")
    assert failed.exit_code == 1
    assert "REGRESSED" in failed.output
    assert run(runs / "better", "--fail-on-regression").exit_code == 0


def test_the_published_rates_show_no_significant_change() -> None:
    output = run(PUBLISHED).output
    assert output.count("UNDERPOWERED") == 5
    assert "No environment changed significantly." in output
    assert "unpaired samples (Fisher, Newcombe)" in output


def test_differences_in_sampling_are_noted(tmp_path: Path) -> None:
    def write_report(name: str, attempts: int, temperature: float) -> Path:
        groups = [group([1.0] * attempts, task_key=str(i)) for i in range(4)]
        agent_info = AgentInfo(model="m", temperature=temperature)
        path = tmp_path / name
        path.write_text(
            EvalReport.from_groups("val", groups, step=0, agent_info=agent_info).to_json()
        )
        return path

    greedy, sampled = write_report("greedy.json", 1, 0.0), write_report("sampled.json", 8, 1.0)
    output = run(greedy, sampled).output
    assert "\nval: temperature: 0 before, 1 after.\n" in output
    assert (
        "\nval: 4 of 4 tasks have more attempts on one side, and the test uses a random subset"
        in output
    )
    assert "generator.eval_n_samples_per_prompt" in output
    assert "before," not in run(sampled, sampled).output


def test_step_is_refused_without_a_run_folder(runs: Path, tmp_path: Path) -> None:
    one = runs / "better" / "reports" / "step_000000" / "unseen.json"
    with pytest.raises(ConfigError, match="step 999 needs a run folder, and neither"):
        run(one, one, "--step", "999")
    with pytest.raises(ConfigError, match=r"step 3 needs a run folder, and .* is a table"):
        run(PUBLISHED, "--step", "3")


def test_missing_folders_extra_arguments_and_ungraded_sets_are_errors(runs: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such file or folder"):
        run(runs / "nowhere")
    with pytest.raises(ConfigError, match="holds both columns; remove"):
        run(PUBLISHED, runs)
    save_report(runs / "blind", 0, "unseen", [None])
    with pytest.raises(
        TaskError, match=r"no task graded in both; see why grades are missing, or evaluate both"
    ):
        run(runs / "blind", runs / "worse")
