"""Commands that read a run folder: replay, diff, log, audit, import-dumps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from tests.fakes.small_runs import SETTINGS, TRAIN, UNSEEN
from tests.trajectories.making import attempt, call_turn, played
from typer.testing import CliRunner

from skyfleet.chat.message import Message, ToolCall
from skyfleet.checkpoints.checkpoint import Manifest
from skyfleet.cli.audit import audit_command
from skyfleet.cli.diff import diff_command
from skyfleet.cli.import_dumps import import_dumps_command
from skyfleet.cli.log import log_command
from skyfleet.cli.replay import replay_command
from skyfleet.config.loading import load_config
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError, TaskError
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.trajectories.archive import eval_path, load, train_path, write_groups
from skyfleet.trajectories.entry import index_path
from skyfleet.trajectories.index import list_entries, list_file_entries
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Turn
from skyfleet.worlds.catalog import open_world, tasks_from_source

OLD = Path(__file__).parents[1] / "assets" / "dumped_evals"
LIMITS = Limits(max_turns=12, max_input_length=0, trajectory_timeout_seconds=0)

app = typer.Typer()
app.command("replay")(replay_command)
app.command("diff")(diff_command)
app.command("log")(log_command)
app.command("audit")(audit_command)
app.command("import-dumps")(import_dumps_command)


def run_output(*args: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in args], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.stdout


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A run with null-agent episodes at step 0 and oracle episodes at step 2."""

    async def write(path: Path, source: str, policy: AgentFactory) -> None:
        tasks = tasks_from_source(source)
        groups = await collect(tasks, open_world, policy, LIMITS, n_samples=1, max_concurrent=4)
        write_groups(path, groups)

    folder = tmp_path / "run"
    await write(train_path(folder / "trajectories", 1), TRAIN, oracle_policy)
    await write(eval_path(folder / "trajectories", "unseen", 0), UNSEEN, null_policy)
    await write(eval_path(folder / "trajectories", "unseen", 2), UNSEEN, oracle_policy)
    (folder / "config.yaml").write_text(SETTINGS)
    return folder


def test_replay_reports_an_identical_episode(run: Path) -> None:
    assert run_output("replay", run, "eval/unseen/0/0") == (
        "eval/unseen/0/0 is the same: 1 turn, done, grade 0\n"
    )
    assert "grade 1" in run_output("replay", run, "train/1/3")


def test_replay_forks_at_the_given_turn_and_prints_both(run: Path) -> None:
    shown = run_output("replay", run, "eval/unseen/0/0", "--fork-at", 1, "--agent", "oracle")
    assert shown.startswith("from turn 1 on: the oracle agent\n")
    assert shown.endswith("recorded: done, grade 0; forked at turn 1: done, grade 1\n")
    assert "\n+ " in shown
    with pytest.raises(TaskError, match="turn 2: the episode has 1 turns"):
        run_output("replay", run, "eval/unseen/0/0", "--fork-at", 2, "--agent", "oracle")
    with pytest.raises(ConfigError, match="need --fork-at"):
        run_output("replay", run, "eval/unseen/0/0", "--agent", "oracle")


def test_a_fork_uses_the_runs_own_checkpoint_in_any_working_directory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = load_config(SETTINGS).trainer.ckpt_path
    assert not Path(named).is_absolute()
    checkpoint(tmp_path / "elsewhere" / named, step=9)
    monkeypatch.chdir(tmp_path / "elsewhere")
    folders: list[Path | None] = []

    def select_agent(config: RunConfig, agent: str, folder: Path | None) -> str:
        folders.append(folder)
        return "oracle"

    monkeypatch.setattr("skyfleet.cli.replay.select_agent", select_agent)
    with pytest.raises(
        ConfigError, match=r"run/checkpoints holds no checkpoint; pass --checkpoint"
    ):
        run_output("replay", run, "eval/unseen/0/0", "--fork-at", 1)
    checkpoint(run / "checkpoints", step=2)
    newest = checkpoint(run / "checkpoints", step=4)
    shown = run_output("replay", run, "eval/unseen/0/0", "--fork-at", 1)
    assert folders == [newest]
    assert shown.startswith(f"from turn 1 on: the policy of step 4, {newest}\n")


def checkpoint(root: Path, *, step: int) -> Path:
    folder = root / f"global_step_{step}"
    (folder / "policy").mkdir(parents=True)
    manifest = Manifest(step=step, skyfleet_version="0", parts=("policy",), files={})
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return folder


def test_an_episode_whose_task_left_the_configuration_is_not_replayed(run: Path) -> None:
    (run / "config.yaml").write_text(SETTINGS.replace(UNSEEN, f"{UNSEEN}&seed=9"))
    with pytest.raises(TaskError, match="is not among the tasks"):
        run_output("replay", run, "eval/unseen/0/0")


def test_diff_shows_how_behaviour_changed_and_one_task_side_by_side(run: Path) -> None:
    table = run_output("diff", run)
    assert table.startswith("unseen: run step 0, run step 2\n")
    assert "| unseen | github      | tool calls " in table
    task = tasks_from_source(UNSEEN)[0].key
    shown = run_output("diff", run, "--task", task)
    assert shown.startswith("The actions differ from turn 1.\n- before\n+ after\n")
    assert run_output("diff", run, "--task", task, "--before", 2).startswith(
        "The actions are the same."
    )
    with pytest.raises(ConfigError, match=r"--eval-set nowhere: .*/run has unseen"):
        run_output("diff", run, "--eval-set", "nowhere")
    with pytest.raises(ConfigError, match=r"--before 7: .*/run was evaluated at steps 0, 2"):
        run_output("diff", run, "--before", 7)
    with pytest.raises(ConfigError, match="--task t: has no attempts on both sides"):
        run_output("diff", run, "--task", "t")


def test_two_runs_are_compared_at_the_last_step_of_both(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "other")
    assert "unseen: run step 2, other step 2\n" in run_output("diff", run, tmp_path / "other")


def test_diff_lists_sets_separately_and_refuses_a_run_without_any(run: Path) -> None:
    folder = run / "trajectories" / "eval"
    shutil.copytree(folder / "unseen", folder / "again")
    lines = run_output("diff", run).splitlines()
    assert {line.split()[1] for line in lines if " turns " in line} == {"again", "unseen"}
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="has no evaluation episodes yet"):
        run_output("diff", run)


def test_diff_groups_the_rarely_called_tools(run: Path) -> None:
    calls = tuple(ToolCall(id=str(n), name=f"\x1b{n}", arguments={}) for n in range(12))
    turn = replace(call_turn(), action=Message(role="assistant", tool_calls=calls))
    for step in (0, 2):
        path = eval_path(run / "trajectories", "unseen", step)
        write_groups(path, played(attempt(0.0, turns=(turn,))))
    shown = run_output("diff", run)
    assert "calls of 2 other names" in shown
    assert "\x1b" not in shown


def test_log_prints_or_writes_the_entry(run: Path, tmp_path: Path) -> None:
    entry = run_output("log", run)
    assert entry.startswith("# run\n\n## Dataset\n")
    file = tmp_path / "entry.md"
    assert not file.exists()
    run_output("log", run, "--output", file)
    assert file.read_text() == entry


def test_audit_finds_nothing_in_a_run_of_reference_solutions(run: Path) -> None:
    assert run_output("audit", run, "--replay").splitlines()[0] == "7 wins, 0 findings."
    assert "needed_tool_unused could judge 7 wins.\n" in run_output("audit", run)
    assert "replay_fails could judge 7 wins.\n" in run_output("audit", run, "--replay")


def test_audit_counts_a_finding_once(run: Path) -> None:
    wins = [load(entry) for entry in list_entries(run / "trajectories") if entry.kind == "train"]
    first = next(win for win in wins if any("update" in _called(turn) for turn in win.turns))
    refused = [
        replace(t, replies=tuple(replace(r, is_error=True) for r in t.replies)) for t in first.turns
    ]
    write_groups(train_path(run / "trajectories", 1), played(replace(first, turns=tuple(refused))))
    shown = run_output("audit", run)
    assert "untouched_state" in shown.splitlines()[2]
    assert "4 wins, 1 finding.\n" in shown


def test_a_truncated_file_loses_only_its_missing_episodes_and_is_named(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut = eval_path(run / "trajectories", "unseen", 2)
    index = index_path(cut).read_text()
    write_groups(cut, played(load(list_file_entries(cut)[0])))
    index_path(cut).write_text(index)
    lost = f"{cut} ends before eval/unseen/2/1: 2 episodes are missing"
    diff = run_output("diff", run)
    assert f"\nLeft out: {lost}" in diff
    assert diff.count(" turns ") == 1
    for command, logged in (("log", "## Error patterns"), ("audit", "could judge 5 wins.")):
        caplog.clear()
        assert logged in run_output(command, run)
        assert f"skipped: {lost}" in caplog.text
    cut.write_bytes(b"")
    with pytest.raises(RecordError, match="3 episodes are missing"):
        run_output("diff", run)


def _called(turn: Turn) -> str:
    return " ".join(call.name for call in turn.action.tool_calls)


def test_import_dumps_makes_a_run_that_the_other_commands_read(tmp_path: Path) -> None:
    run = tmp_path / "old"
    assert "as set val at step 20" in run_output("import-dumps", OLD, run, "--dry-run")
    assert not run.exists()
    run_output("import-dumps", OLD, run)
    assert "turns" in run_output("diff", run)
    assert "## Results" in run_output("log", run)
    assert run_output("audit", run).startswith(
        "Not judged, because the configuration no longer names"
    )


def test_an_entry_is_appended_to_the_log_of_a_clone_or_to_a_file_here(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_output("log", run, "--append") == "The entry is appended to experiments.md.\n"
    assert not (tmp_path / "docs").exists()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "experiments.md").write_text("# Experiments\n")
    assert "commit it before `skyfleet launch`" in run_output("log", run, "--append")
