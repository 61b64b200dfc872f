"""`skyfleet evaluate` scores whoever is named, with baselines beside it, and without torch."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.fakes.small_runs import SETTINGS
from typer.testing import CliRunner

from skyfleet.analysis.run_folder import open_run
from skyfleet.cli.main import app
from skyfleet.engines import http_client as posting
from skyfleet.errors import ConfigError
from skyfleet.evaluation import evaluate as evaluation
from skyfleet.evaluation.agent_info import AgentInfo
from skyfleet.evaluation.baselines import Baseline
from skyfleet.evaluation.report import EvalReport
from skyfleet.rollouts import episode as collect
from skyfleet.rollouts.episode import run_episode
from skyfleet.tasks.task import Task
from skyfleet.trajectories.archive import eval_path, read_trajectories
from skyfleet.trajectories.trajectory import Trajectory


def run(*args: str) -> str:
    result = CliRunner().invoke(app, ["evaluate", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def cells(output: str) -> list[list[str]]:
    lines = [line for line in output.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture
def settings(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(f"{SETTINGS}\n")
    return str(file)


@pytest.mark.parametrize(("agent", "rate"), [("oracle", "100.0 %"), ("null", "0.0 %")])
def test_a_scripted_agent_is_scored_on_every_part_of_every_set(
    settings: str, tmp_path: Path, agent: str, rate: str
) -> None:
    rows = cells(run(settings, "--agent", agent))
    assert [row[:3] for row in rows if row[1] in ("github", "outlook", "trained", "held out")] == [
        ["unseen", "github", "3"],
        ["unseen", "trained", "3"],
        ["elsewhere", "outlook", "2"],
        ["elsewhere", "held out", "2"],
    ]
    assert {row[3] for row in rows} == {rate}
    assert {tuple(row[-2:]) for row in rows if row[1] == "github"} == {("0.0 %", "100.0 %")}


def test_what_is_kept_is_a_run_folder_that_other_commands_read(
    settings: str, tmp_path: Path
) -> None:
    output = tmp_path / "deep" / "kept"
    run(settings, "--agent", "oracle", "--output", str(output))
    report = EvalReport.from_json((output / "reports/step_000000/unseen.json").read_text())
    assert report.baselines["github"].null_rate == 0.0
    assert report.baselines["github"].oracle_rate == 1.0
    assert report.played_by == AgentInfo(agent="oracle", max_turns=8)
    kept = open_run(output)
    assert sorted(kept.reports()) == ["elsewhere", "unseen"]
    assert [entry.id for entry in kept.entries()] == [
        *(f"eval/elsewhere/0/{n}" for n in range(2)),
        *(f"eval/unseen/0/{n}" for n in range(3)),
    ]
    for command in (["analyze"],):
        done = CliRunner().invoke(app, [*command, str(output)], catch_exceptions=False)
        assert done.exit_code == 0
        assert "5 episodes" in done.output


def test_a_set_is_kept_when_it_ends_and_not_when_all_have(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second_breaks(name: str, tasks: object, *rest: Any, **more: Any) -> Any:
        if name == "elsewhere":
            raise KeyboardInterrupt
        return evaluate(name, tasks, *rest, **more)  # type: ignore[arg-type]

    evaluate = evaluation.evaluate
    monkeypatch.setattr(evaluation, "evaluate", second_breaks)
    args = ["evaluate", settings, "--agent", "null", "--output", str(tmp_path / "kept")]
    assert CliRunner().invoke(app, args).exit_code != 0
    assert [p.name for p in (tmp_path / "kept").rglob("*.json")] == ["unseen.json"]


def test_an_interruption_keeps_the_episodes_that_have_ended(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Trajectory] = []

    async def third_is_cut(task: Task, *rest: Any, sample: int) -> Trajectory:
        if len(played) == 2:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(10)
        played.append(await run_episode(task, *rest, sample=sample))
        return played[-1]

    # Who is started in the background ignores it, and asyncio leaves that so.
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)
    output = tmp_path / "kept"
    args = [
        "evaluate",
        settings,
        "--agent",
        "null",
        "--eval-set",
        "unseen",
        "--output",
        str(output),
    ]
    run(*args[1:])
    monkeypatch.setattr(collect, "run_episode", third_is_cut)
    # Baselines are played before, and need not be cut.
    monkeypatch.setattr("skyfleet.evaluation.baselines.measure_baselines", no_baselines)
    result = CliRunner().invoke(app, [*args, "generator.max_num_seqs=1"])
    assert result.exit_code == 130
    assert f"Interrupted; finished episodes are in {output}." in result.output
    kept = read_trajectories(eval_path(output / "trajectories", "unseen", 0))
    assert [attempt.task_key for attempt in kept] == [attempt.task_key for attempt in played]
    assert len(played) == 2
    assert not list(output.rglob("unseen.json"))  # the report of others than these


def test_a_folder_takes_one_players_evaluations(settings: str, tmp_path: Path) -> None:
    args = [settings, "--eval-set", "unseen", "--output", str(tmp_path / "kept")]
    run(*args, "--agent", "null")
    run(*args, "--agent", "null")  # the same again is fine
    result = CliRunner().invoke(app, ["evaluate", *args, "--agent", "oracle"])
    assert isinstance(result.exception, ConfigError)
    assert "holds results of another agent (agent: null before, oracle after)" in str(
        result.exception
    )


async def no_baselines(*rest: Any, **more: Any) -> dict[str, Baseline]:
    return {}


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "evaluate", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output .*file: .*; name a folder that can be"):
        run(settings, "--agent", "null", "--output", str(tmp_path / "file"))
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="holds a training run; name another folder"):
        run(settings, "--agent", "null", "--output", str(tmp_path))


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["data.train_data=[/nothere.jsonl]"], "cannot be read: /nothere.jsonl"),
        (["data.env_filter=[outlook]"], "cannot be read: data.env_filter='outlook'"),
    ],
)
def test_training_data_that_cannot_be_read_leaves_environments_unmarked(
    settings: str, args: list[str], sentence: str
) -> None:
    output = run(settings, *args, "--agent", "null", "--eval-set", "unseen")
    assert [row[1] for row in cells(output) if row[1] in ("trained", "held out")] == []
    assert sentence in output


def test_only_environments_that_the_filter_lets_through_count_as_trained(settings: str) -> None:
    args = ('data.train_data=["world:github?split=train", "world:outlook?split=train"]',)
    output = run(settings, *args, "data.env_filter=[outlook]", "--agent", "null")
    assert {row[1] for row in cells(output) if row[0] == "elsewhere"} >= {"trained"}
    assert {row[1] for row in cells(output) if row[0] == "unseen"} >= {"held out"}


def test_a_random_caller_may_try_as_often_as_asked(settings: str) -> None:
    args = (
        "generator.eval_n_samples_per_prompt=2",
        "generator.eval_sampling_params.temperature=1",
    )
    output = run(settings, *args, "--agent", "random", "--eval-set", "unseen")
    assert "| pass@2 | pass^2 |" in output
    assert cells(output)[0][:3] == ["unseen", "github", "3"]


def test_a_threshold_that_doing_nothing_reaches_shows_itself(settings: str) -> None:
    output = run(settings, "--agent", "null", "--eval-set", "unseen", "--pass-threshold", "0")
    assert cells(output)[0][3] == "100.0 %"
    assert "\nunseen: github: 100.0% of the tasks pass when nothing is done (" in output


def test_greedy_attempts_at_an_endpoint_are_refused_with_the_reason(settings: str) -> None:
    greedy = (settings, "generator.eval_n_samples_per_prompt=3")
    endpoint = ("--endpoint", "http://127.0.0.1:9", "--model", "m")
    with pytest.raises(
        ConfigError, match="samples the same attempt 3 times, so pass@3 equals pass@1"
    ):
        run(*greedy, *endpoint)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--endpoint", "http://x"), "--endpoint and --model belong together"),
        (("--endpoint", "http://x", "--model", "m", "--agent", "null"), "remove them"),
        (
            ("--agent", "null", "--checkpoint", "/nothere"),
            "--agent null uses no checkpoint",
        ),
        (("--agent", "null", "--pass-threshold", "nan"), "--pass-threshold nan: give a number"),
        (("trainer.resume_mode=none",), "uses the base model, and a tiny policy has none"),
    ],
)
def test_contradictions_are_refused(settings: str, args: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run(settings, *args)


class Handler(BaseHTTPRequestHandler):
    """Says it is done to whoever brings the key, and keeps what it was asked."""

    asked: ClassVar[list[dict[str, Any]]]
    patience: ClassVar[int]
    refuses: ClassVar[str | None]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = self.headers["Authorization"] == "Bearer secret"
        known = known and len(self.asked) < self.patience
        self.asked.append(body)
        answer = {"choices": [{"message": {"role": "assistant", "content": "<done>"}}]}
        text = json.dumps(answer if known else {"error": "who are you?"}).encode()
        status = 200 if known else 401
        if self.refuses in body:
            error = {"code": "unsupported_value", "param": self.refuses}
            text, status = json.dumps({"error": error}).encode(), 400
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def endpoint(
    *, answers: int = sys.maxsize, unknown: str | None = None
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Refuses after so many answers, and whatever has the key `unknown`."""

    class Kept(Handler):
        asked: ClassVar[list[dict[str, Any]]] = []
        patience = answers
        refuses = unknown

    with ThreadingHTTPServer(("127.0.0.1", 0), Kept) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", Kept.asked
        finally:
            server.shutdown()


def test_a_model_behind_an_endpoint_is_scored(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    args = (
        "generator.eval_n_samples_per_prompt=2",
        "generator.eval_sampling_params.temperature=1",
    )
    with endpoint() as (url, asked):
        output = run(settings, *args, "--endpoint", url, "--model", "m", "--eval-set", "unseen")
    assert cells(output)[0][:4] == ["unseen", "github", "3", "0.0 %"]
    hello, *played = asked
    assert hello["seed"] == 0  # what would refuse a seed would refuse every turn
    assert {body["model"] for body in played} == {"m"}
    assert len({body["seed"] for body in played}) == 6  # attempts at one task are not one attempt


def test_an_endpoint_that_does_not_answer_is_found_out_before_anything_is_played(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with endpoint() as (url, asked):
        with pytest.raises(
            ConfigError, match=r"does not answer: .* rejected the request with 401.*OPENAI_API_KEY"
        ):
            run(settings, "--endpoint", url, "--model", "m", "--eval-set", "unseen")
        assert len(asked) == 1


def test_a_rejected_request_and_a_silent_endpoint_give_different_errors(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    args = (settings, "generator.eval_sampling_params.temperature=0.5", "--eval-set", "unseen")
    sentence = r"rejects the request: .*temperature.*; change generator.eval_sampling"
    with endpoint(unknown="temperature") as (url, _), pytest.raises(ConfigError, match=sentence):
        run(*args, "--endpoint", url, "--model", "m")


def test_an_endpoint_that_refuses_leaves_grades_unknown_and_says_why(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with endpoint(answers=1) as (url, _):
        args = [settings, "--endpoint", url, "--model", "m", "--eval-set", "unseen"]
        result = CliRunner().invoke(app, ["evaluate", *args])
    output = result.output
    assert "no attempt could be graded" in str(result.exception)
    assert cells(output)[0][2:4] == ["0", ""]
    assert "unseen: 3 of 3 attempts have no grade; the first: EngineError: " in output
    assert "rejected the request with 401" in output


def test_scripted_agents_and_comparisons_need_no_torch(settings: str, tmp_path: Path) -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from skyfleet.cli.compare import compare_command
from skyfleet.cli.main import app
app.command("compare_")(compare_command)
for agent in ("null", "oracle"):
    words = ["evaluate", {settings!r}, "--agent", agent, "--eval-set", "unseen", "--output", agent]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
result = CliRunner().invoke(app, ["compare_", "null", "oracle"], catch_exceptions=False)
assert "unseen" in result.output, result.output
print(*sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
