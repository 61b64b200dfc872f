"""The behaviour summary per environment, and the command that prints it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from tests.trajectories.making import attempt, call_turn, transcript
from typer.testing import CliRunner

from skyfleet.analysis.behaviour import summarize_behaviour
from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.formatting import NOTHING
from skyfleet.chat.message import Message, ToolCall
from skyfleet.cli.analyze import analyze_command
from skyfleet.errors import ConfigError
from skyfleet.trajectories.archive import EpisodeWriter, eval_path, train_path
from skyfleet.trajectories.index import list_entries
from skyfleet.trajectories.trajectory import Ending, Trajectory

PASSED = attempt(1.0, turns=(call_turn(), call_turn()), transcripts=(transcript(5),))
ERRED = attempt(
    0.0, turns=(call_turn(is_error=True),), transcripts=(transcript(3),), ending=Ending.MAX_TURNS
)
UNREAD = attempt(0.0, turns=(call_turn(malformed=True), replace(call_turn(), replies=())))
UNKNOWN = attempt(None, env_key="reddit", turns=(call_turn(),))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Training has all four; `val` has two failures before, and one pass and one failure after."""
    (tmp_path / "config.yaml").write_text("{}\n")
    trajectories = tmp_path / "trajectories"
    _write(train_path(trajectories, 1), PASSED, ERRED, UNREAD, UNKNOWN)
    _write(eval_path(trajectories, "val", 0), ERRED, UNREAD)
    _write(eval_path(trajectories, "val", 40), PASSED, UNREAD)
    return tmp_path


def _write(path: Path, *episodes: Trajectory) -> None:
    with EpisodeWriter(path) as writer:
        for episode in episodes:
            writer.add(episode)


def test_an_environment_sums_its_episodes(run: Path) -> None:
    entries = [one for one in list_entries(run / "trajectories") if one.kind == "train"]
    github = summarize_behaviour(entries).by_env["github"]
    assert (github.n_episodes, github.n_passed, github.n_unknown) == (3, 1, 0)
    assert (github.turns, github.malformed_calls, github.sampled_tokens) == (5, 1, 8)
    assert (github.tool_calls, github.tool_errors) == ({"press": 4}, {"press": 1})
    assert (github.engine_seconds, github.env_seconds) == (5.0, 2.5)
    assert github.endings == {Ending.DONE: 2, Ending.MAX_TURNS: 1}


def test_failures_are_counted_by_class_with_example_ids(run: Path) -> None:
    entries = [one for one in list_entries(run / "trajectories") if one.kind == "train"]
    behaviour = summarize_behaviour(entries)
    github, reddit = behaviour.by_env["github"], behaviour.by_env["reddit"]
    assert github.failures == {FailureClass.OUT_OF_TURNS: 1, FailureClass.MALFORMED_CALL: 1}
    assert github.examples[FailureClass.OUT_OF_TURNS] == ("train/1/1",)
    assert reddit.failures == {FailureClass.VERIFIER_FAULT: 1}
    assert behaviour.by_set == {}


def test_an_evaluation_set_is_counted_per_step(run: Path) -> None:
    steps = summarize_behaviour(list_entries(run / "trajectories")).by_set["val"]
    assert list(steps) == [0, 40]
    assert steps[0].failures[FailureClass.OUT_OF_TURNS] == 1
    assert (steps[40].n_episodes, sum(steps[40].failures.values())) == (2, 1)


def test_only_the_given_entries_are_read(run: Path) -> None:
    entries = list_entries(run / "trajectories")
    read: list[None] = []
    behaviour = summarize_behaviour([entries[1], entries[3]], on_read=lambda: read.append(None))
    assert len(read) == 2
    assert {env.n_episodes for env in behaviour.by_env.values()} == {1}


def _analyze(*words: str) -> str:
    app = typer.Typer()
    app.command()(analyze_command)
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    return result.stdout


def test_the_command_prints_tables_examples_and_failure_shifts(run: Path) -> None:
    shown = _analyze(str(run))
    assert f"{run.name}: 8 episodes, 5 failed, 1 unknown" in shown
    assert "| press " in shown
    assert "train/1/3" in shown
    assert row(shown, "val", "passed", "0: 0.0 %", "40: 50.0 %", "+50.0")
    assert row(shown, "val", "out of turns", "0: 50.0 %", "40: 0.0 %", "-50.0")
    # One task is not enough evidence.
    assert shown.count("may be chance") == 3


def row(text: str, *cells: str) -> bool:
    """Whether a row of the table starts with these cells."""
    lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines())
    return any(line[: len(cells)] == list(cells) for line in lines)


def test_an_ungraded_episode_is_not_a_failure(run: Path) -> None:
    shown = _analyze(str(run), "--eval-set", "train")
    assert row(shown, "github", "3", "33.3 %", "0")
    assert row(shown, "reddit", "1", NOTHING, "1")


def test_an_unmeasured_value_is_a_dash(run: Path) -> None:
    shown = _analyze(str(run), "--eval-set", "train")
    assert row(shown, "reddit", "1", NOTHING, "1", "1.00", "1.00", "0.00", "0.00", NOTHING, "1.000")


def test_a_run_without_tool_calls_has_no_tool_table(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}\n")
    _write(train_path(tmp_path / "trajectories", 1), attempt(0.0))
    shown = _analyze(str(tmp_path))
    assert "gave up" in shown or "false completion" in shown
    assert "| tool " not in shown


def test_rarely_called_tools_share_a_row(run: Path) -> None:
    calls = [ToolCall(id=str(n), name=f"tool_{n}", arguments={}) for n in range(12)]
    turn = replace(call_turn(), action=Message(role="assistant", tool_calls=tuple(calls)))
    _write(train_path(run / "trajectories", 1), attempt(0.0, turns=(turn, turn)))
    assert row(_analyze(str(run), "--eval-set", "train"), "github", "(2 other names)", "4", "0")


def test_unreadable_files_are_reported_and_skipped(run: Path) -> None:
    index = run / "trajectories" / "train" / "step_000001.index.jsonl"
    index.write_text(index.read_text() + "[1]\n")
    shown = _analyze(str(run))
    assert "4 episodes, 3 failed, 0 unknown" in shown
    assert f"Left out: {index} line 6: " in shown
    data = run / "trajectories" / "eval" / "val" / "step_000000.jsonl.gz"
    data.write_bytes(b"\0" * data.stat().st_size)
    shown = _analyze(str(run))
    assert "2 episodes, 1 failed, 0 unknown; 2 more could not be read" in shown
    assert f"Left out: {data} at byte 0: " in shown
    assert len(json.loads(_analyze(str(run), "--json"))["left_out"]) == 2


@pytest.mark.parametrize(("whole", "more_bytes"), [(3, 5), (2, 0), (2, 5), (0, 0)])
def test_a_truncated_file_reports_the_number_of_missing_episodes(
    run: Path, whole: int, more_bytes: int
) -> None:
    path = train_path(run / "trajectories", 1)
    ends = [0]
    with EpisodeWriter(path) as writer:
        for _ in range(4):
            writer.add(ERRED)
            writer.flush()
            ends.append(path.stat().st_size)
    path.write_bytes(path.read_bytes()[: ends[whole] + more_bytes])
    shown = _analyze(str(run), "--eval-set", "train")
    assert f"{whole} episodes, {whole} failed, 0 unknown; {4 - whole} more could not" in shown
    assert (
        f"Left out: {path} ends before train/1/{whole}: {4 - whole} episodes are missing" in shown
    )
    assert len(json.loads(_analyze(str(run), "--json"))["left_out"]) == 1


def test_the_command_prints_json(run: Path) -> None:
    result = json.loads(_analyze(str(run), "--eval-set", "val", "--step", "40", "--json"))
    assert result["by_env"]["github"]["failures"] == {"malformed call": 1}
    assert result["by_set"]["val"]["40"]["n_episodes"] == 2


def test_an_unknown_set_or_step_lists_the_known_ones(run: Path) -> None:
    with pytest.raises(ConfigError, match="--eval-set test: the run has train, val"):
        _analyze(str(run), "--eval-set", "test")
    with pytest.raises(ConfigError, match="--step 7: the run has steps 0, 40"):
        _analyze(str(run), "--eval-set", "val", "--step", "7")


def test_control_characters_in_tool_names_are_escaped(run: Path) -> None:
    call = ToolCall(id="0", name="\x1b[2Jpress", arguments={})
    turn = replace(call_turn(), action=Message(role="assistant", tool_calls=(call,)))
    _write(train_path(run / "trajectories", 1), attempt(0.0, turns=(turn,)))
    assert "\x1b" not in _analyze(str(run), "--eval-set", "train")
