"""`skyfleet evaluate` scores any agent beside baselines; scripted agents need no torch."""

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
from skyfleet.engines import http_client
from skyfleet.errors import ConfigError
from skyfleet.evaluation import evaluate as evaluation
from skyfleet.evaluation.agent_info import AgentInfo
from skyfleet.evaluation.baselines import Baseline
from skyfleet.evaluation.report import EvalReport
from skyfleet.rollouts import episode
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
def test_a_scripted_agent_is_scored_on_every_environment_of_every_set(
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


def test_the_output_is_a_run_folder_that_other_commands_read(settings: str, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "kept"
    run(settings, "--agent", "oracle", "--output", str(output))
    report = EvalReport.from_json((output / "reports/step_000000/unseen.json").read_text())
    assert report.baselines["github"].null_rate == 0.0
    assert report.baselines["github"].oracle_rate == 1.0
    assert report.agent_info == AgentInfo(agent="oracle", max_turns=8)
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


def test_each_set_is_saved_as_soon_as_it_ends(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_second(name: str, tasks: object, *rest: Any, **more: Any) -> Any:
        if name == "elsewhere":
            raise KeyboardInterrupt
        return evaluate(name, tasks, *rest, **more)  # type: ignore[arg-type]

    evaluate = evaluation.evaluate
    monkeypatch.setattr(evaluation, "evaluate", interrupt_second)
    args = ["evaluate", settings, "--agent", "null", "--output", str(tmp_path / "kept")]
    assert CliRunner().invoke(app, args).exit_code != 0
    assert [p.name for p in (tmp_path / "kept").rglob("*.json")] == ["unseen.json"]


def test_an_interrupt_keeps_the_finished_episodes(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[Trajectory] = []

    async def interrupt_third(task: Task, *rest: Any, **options: Any) -> Trajectory:
        if len(finished) == 2:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(10)
        finished.append(await run_episode(task, *rest, **options))
        return finished[-1]

    # A process started in the background ignores SIGINT, and asyncio does not change that.
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
    monkeypatch.setattr(episode, "run_episode", interrupt_third)
    # Baselines run first, and the interrupt must not hit them.
    monkeypatch.setattr("skyfleet.evaluation.baselines.measure_baselines", no_baselines)
    result = CliRunner().invoke(app, [*args, "generator.max_num_seqs=1"])
    assert result.exit_code == 130
    assert f"Interrupted; finished episodes are in {output}." in result.output
    kept = read_trajectories(eval_path(output / "trajectories", "unseen", 0))
    assert [attempt.task_key for attempt in kept] == [attempt.task_key for attempt in finished]
    assert len(finished) == 2
    assert not list(output.rglob("unseen.json"))  # it described the episodes of the first run


def test_an_output_folder_holds_the_evaluations_of_one_agent(settings: str, tmp_path: Path) -> None:
    args = [settings, "--eval-set", "unseen", "--output", str(tmp_path / "kept")]
    run(*args, "--agent", "null")
    run(*args, "--agent", "null")  # the same agent again is fine
    result = CliRunner().invoke(app, ["evaluate", *args, "--agent", "oracle"])
    assert isinstance(result.exception, ConfigError)
    assert "holds results of another agent (agent: null before, oracle after)" in str(
        result.exception
    )


async def no_baselines(*rest: Any, **more: Any) -> dict[str, Baseline]:
    return {}


def test_an_unwritable_output_folder_is_refused_before_any_episode(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "evaluate", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output .*file: .*; name a writable folder"):
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
def test_unreadable_training_data_leaves_environments_unmarked(
    settings: str, args: list[str], sentence: str
) -> None:
    output = run(settings, *args, "--agent", "null", "--eval-set", "unseen")
    assert [row[1] for row in cells(output) if row[1] in ("trained", "held out")] == []
    assert sentence in output


def test_only_environments_in_env_filter_count_as_trained(settings: str) -> None:
    args = ('data.train_data=["world:github?split=train", "world:outlook?split=train"]',)
    output = run(settings, *args, "data.env_filter=[outlook]", "--agent", "null")
    assert {row[1] for row in cells(output) if row[0] == "elsewhere"} >= {"trained"}
    assert {row[1] for row in cells(output) if row[0] == "unseen"} >= {"held out"}


def test_the_random_agent_makes_the_configured_number_of_attempts(settings: str) -> None:
    args = (
        "generator.eval_n_samples_per_prompt=2",
        "generator.eval_sampling_params.temperature=1",
    )
    output = run(settings, *args, "--agent", "random", "--eval-set", "unseen")
    assert "| pass@2 | pass^2 |" in output
    assert cells(output)[0][:3] == ["unseen", "github", "3"]


def test_a_threshold_that_the_null_agent_passes_is_reported_as_vacuous(settings: str) -> None:
    output = run(settings, "--agent", "null", "--eval-set", "unseen", "--pass-threshold", "0")
    assert cells(output)[0][3] == "100.0 %"
    assert "\nunseen: github: 100.0% of the tasks pass when nothing is done (" in output


def test_greedy_attempts_at_an_endpoint_are_warned_about(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with endpoint() as (url, _):
        greedy = (settings, "generator.eval_n_samples_per_prompt=3", "--eval-set", "unseen")
        args = (*greedy, "--endpoint", url, "--model", "m")
        sentence = "samples the same attempt 3 times, so pass@3 equals pass@1"
        assert sentence in run(*args)
        assert sentence in run(*args, "--dry-run")


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
def test_contradictory_options_are_refused(
    settings: str, args: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run(settings, *args)


class Handler(BaseHTTPRequestHandler):
    """Answers `<done>` to requests with the right key, and records every request body."""

    bodies: ClassVar[list[dict[str, Any]]]
    max_answers: ClassVar[int]
    rejected_key: ClassVar[str | None]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        authorized = self.headers["Authorization"] == "Bearer secret"
        authorized = authorized and len(self.bodies) < self.max_answers
        self.bodies.append(body)
        answer = {"choices": [{"message": {"role": "assistant", "content": "<done>"}}]}
        text = json.dumps(answer if authorized else {"error": "who are you?"}).encode()
        status = 200 if authorized else 401
        if self.rejected_key in body:
            error = {"code": "unsupported_value", "param": self.rejected_key}
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
    """An endpoint that answers `answers` requests, and rejects bodies with the key `unknown`."""

    class EndpointHandler(Handler):
        bodies: ClassVar[list[dict[str, Any]]] = []
        max_answers = answers
        rejected_key = unknown

    with ThreadingHTTPServer(("127.0.0.1", 0), EndpointHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", EndpointHandler.bodies
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
    with endpoint() as (url, bodies):
        output = run(settings, *args, "--endpoint", url, "--model", "m", "--eval-set", "unseen")
    assert cells(output)[0][:4] == ["unseen", "github", "3", "0.0 %"]
    probe, *turns = bodies
    assert probe["seed"] == 0  # an endpoint that rejects a seed would reject every turn
    assert {body["model"] for body in turns} == {"m"}
    assert len({body["seed"] for body in turns}) == 6  # one seed per attempt


def test_an_endpoint_that_rejects_the_api_key_is_an_error_before_any_episode(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "INITIAL_BACKOFF_SECONDS", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with endpoint() as (url, bodies):
        with pytest.raises(
            ConfigError, match=r"does not answer: .* rejected the request with 401.*OPENAI_API_KEY"
        ):
            run(settings, "--endpoint", url, "--model", "m", "--eval-set", "unseen")
        assert len(bodies) == 1


def test_a_rejected_request_and_a_silent_endpoint_give_different_errors(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    args = (settings, "generator.eval_sampling_params.temperature=0.5", "--eval-set", "unseen")
    sentence = r"rejects the request: .*temperature.*; change generator.eval_sampling"
    with endpoint(unknown="temperature") as (url, _), pytest.raises(ConfigError, match=sentence):
        run(*args, "--endpoint", url, "--model", "m")


def test_an_endpoint_that_fails_later_leaves_grades_unknown_and_prints_the_reason(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "INITIAL_BACKOFF_SECONDS", 0.01)
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
