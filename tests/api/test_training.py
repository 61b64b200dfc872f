"""Training from Python: results, callbacks, steps, models given as objects, interruption."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyfleet as sf
from skyfleet.api.background import run_sync
from skyfleet.api.terminating import exit_after_saving
from skyfleet.config.loading import load_config_file

TASKS = [{"prompt": f"Say the number {n}.", "number": n, "key": f"say-{n}"} for n in range(8)]
SMALL: dict[str, Any] = {
    "batch_size": 2,
    "algorithm": sf.GRPO(group_size=2, kl=0),
    "sampling": sf.Sampling(max_tokens=4),
    "config": {"trainer.policy.model_config_kwargs": {"hidden_size": 32, "num_hidden_layers": 1}},
}


def length(answer: str) -> float:
    return float(len(answer) % 3)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> sf.TrainResult:
    folder = tmp_path_factory.mktemp("runs") / "numbers"
    arguments = {**SMALL, "tasks": TASKS[:4], "eval": TASKS[4:], "steps": 2, "run_dir": folder}
    return sf.train("tiny", reward=length, **arguments)


def test_a_result_has_a_comparison_metrics_and_a_run(result: sf.TrainResult) -> None:
    assert (result.step, result.interrupted) == (2, False)
    assert result.comparison["val"].overall.n_tasks == 4
    assert "| val | numbers" in str(result.comparison)
    assert "<table>" in result.comparison._repr_html_()
    assert result.metrics["step"] == [0, 1, 2]
    assert result.metrics.to_arrow().num_rows == 3
    assert list(result.metrics.to_pandas()["step"]) == [0, 1, 2]
    chart = result.metrics.plot("reward/avg_raw_reward")
    assert chart._repr_html_().startswith("<svg")
    with pytest.raises(sf.ConfigError, match="there is no column 'reward'; some that exist"):
        result.metrics.plot("reward")
    assert "numbers" in repr(result)
    assert "<table>" in result._repr_html_()


def test_the_run_folder_has_the_configuration_and_the_episodes(result: sf.TrainResult) -> None:
    run = sf.load_run(result.folder)
    assert run.config["generator.n_samples_per_prompt"] == 2
    assert load_config_file(result.folder / "config.yaml").trainer.train_batch_size == 2
    assert list(run.checkpoints) == [0, 2]
    training = run.trajectories(kind="train", step="last")
    assert len(training) == 4
    assert {t.env_key for t in training} == {"numbers"}
    assert training[0].messages[0].text.startswith("Say the number")
    assert set(training.to_pandas()["task"]) <= {task["key"] for task in TASKS}
    assert len(run.trajectories(eval_set="val", passed=False)) <= 8
    with pytest.raises(sf.ConfigError, match="choose from numbers"):
        run.trajectories(env="unknown")
    assert run.report().path.exists()
    viewer = run.view(open_browser=False)
    assert viewer.url.startswith("http://")
    viewer.stop()


def test_a_policy_generates_plays_and_is_saved(result: sf.TrainResult, tmp_path: Path) -> None:
    with result.policy as policy:
        assert policy.generate("Hello", sampling=sf.Sampling(max_tokens=2)).role == "assistant"
        env = sf.ToolEnv(reward=length)
        assert policy.rollout(env, TASKS[0]).reward in (0.0, 1.0, 2.0)
        saved = policy.save(tmp_path / "saved")
    names = {path.name for path in saved.iterdir()}
    assert "config.json" in names
    assert "optimizer.pt" not in names
    loaded = sf.load_policy(saved)
    assert loaded.generate("Hello", sampling=sf.Sampling(max_tokens=2)).role == "assistant"
    loaded.close()


def test_evaluations_of_the_same_policy_agree_and_are_compared(result: sf.TrainResult) -> None:
    env = sf.ToolEnv(reward=length)
    before = sf.evaluate(result.policy, env, TASKS, attempts=2)
    after = sf.evaluate(result.folder, env, TASKS, attempts=2)
    assert before.report.outcomes == after.report.outcomes
    assert len(before.trajectories) == 16
    assert sf.compare(before, after).difference == 0.0
    result.policy.close()


def test_runs_evaluations_and_folders_are_compared_with_each_other(
    result: sf.TrainResult, tmp_path: Path
) -> None:
    env, run = sf.ToolEnv(reward=length, name="numbers"), result.run
    evaluation = sf.evaluate(run, env, TASKS[4:])
    evaluation.save(tmp_path)
    for before, after in (
        (run, run),
        (result, result.folder),
        (evaluation, run),
        (run, evaluation),
    ):
        assert sf.compare(before, after).difference == 0.0
    assert sf.compare(evaluation, tmp_path).difference == 0.0
    assert sf.compare(run, step=2)["val"].overall.n_tasks == 4
    with pytest.raises(sf.ConfigError, match="was evaluated at"):
        sf.compare(run, step=7)
    with pytest.raises(sf.ConfigError, match="neither is a run; leave step out"):
        sf.compare(evaluation, evaluation, step=1)
    run.evaluations["val"][2].require_grades()


def test_arguments_that_have_no_effect_are_refused(result: sf.TrainResult) -> None:
    assert sf.load_policy(result.run, step=0).source.step == 0
    with pytest.raises(sf.ConfigError, match="only a run has steps"):
        sf.load_policy("tiny", step=5)
    with pytest.raises(sf.ConfigError, match=r"pass config to sf\.load_policy"):
        sf.serve(result.policy, config={"trainer.seed": 1})


def test_several_attempts_are_sampled_whatever_else_sampling_says(result: sf.TrainResult) -> None:
    arguments: dict[str, Any] = {"reward": length, "tasks": TASKS[:1], "name": None}
    arguments |= {"pass_threshold": None, "sampling": sf.Sampling(max_tokens=2)}
    evaluation = sf.evaluate(result.run, attempts=2, **arguments)
    assert evaluation.name == "val"
    assert evaluation.report.agent_info is not None
    assert evaluation.report.agent_info.temperature == 1.0


def test_a_run_without_evaluations_has_no_best_step(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {**SMALL, "tasks": TASKS[:4], "eval": False, "steps": 1}
    trained = sf.train("tiny", reward=length, **arguments)
    assert trained.best_step is None
    assert capsys.readouterr().out.endswith(f"The run is in {trained.folder}.\n")
    with pytest.raises(sf.ConfigError, match="was never evaluated"):
        trained.run.policy("best")


def test_the_commands_cannot_open_an_environment_of_another_process(
    result: sf.TrainResult,
) -> None:
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.cli.run_tasks import load_episode_tasks

    with pytest.raises(sf.ConfigError, match="an object of the script that started it"):
        load_episode_tasks(open_run(result.folder), [])


def test_training_starts_from_a_loaded_model_and_from_a_policy(result: sf.TrainResult) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(result.policy.source.path)
    module = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arguments = {**SMALL, "config": None, "tasks": TASKS[:4], "eval": False, "steps": 1}
    assert sf.train(module, reward=length, tokenizer=tokenizer, **arguments).step == 1
    lora = {**arguments, "lora": 2}
    assert sf.train(result.policy, reward=length, **lora).step == 1


def test_a_callback_stops_the_run_and_may_be_async() -> None:
    seen: list[Any] = []

    async def on_step(step: Any) -> Any:
        await asyncio.sleep(0)
        seen.append((step.number, type(step.groups[0].trajectories[0]).__name__))
        return sf.STOP

    stopped = sf.train(
        "tiny",
        reward=length,
        tasks=TASKS[:4],
        eval={"held": TASKS[4:6]},
        steps=3,
        on_step=on_step,
        on_episode=lambda trajectory: seen.append(trajectory.task_key),
        on_evaluation=lambda evaluation: seen.append(evaluation.name),
        **SMALL,
    )
    assert stopped.step == 1
    assert (1, "Trajectory") in seen
    assert "held" in seen
    assert sum(str(one).startswith("say-") for one in seen) == 4


async def test_async_callbacks_of_an_asyncio_program_run_in_its_loop() -> None:
    seen: list[Any] = []

    async def note(value: Any) -> Any:
        await asyncio.sleep(0.01)
        assert asyncio.get_running_loop() is caller
        seen.append(type(value).__name__)
        return sf.STOP if type(value).__name__ == "StepResult" else None

    caller = asyncio.get_running_loop()
    arguments = {**SMALL, "tasks": TASKS[:4], "eval": {"held": TASKS[4:6]}, "steps": 3}
    arguments |= {"on_step": note, "on_episode": note, "on_evaluation": note}
    stopped = await sf.train_async("tiny", reward=length, **arguments)
    assert stopped.step == 1
    assert seen.count("Trajectory") == 4
    assert seen.count("StepResult") == 1
    assert seen.count("Evaluation") == 2  # before the first step and after the last
    assert stopped.comparison["held"].overall.n_tasks == 2
    await sf.evaluate_async("null", reward=length, tasks=TASKS[:2], on_episode=note)
    assert seen.count("Trajectory") == 6


def test_a_trainer_iterates_breaks_evaluates_and_saves() -> None:
    arguments = {**SMALL, "tasks": TASKS[:4], "eval": False, "steps": 3}
    with sf.Trainer("tiny", reward=length, **arguments) as trainer:
        for step in trainer:
            assert step.groups[0].rewards
            assert "policy/policy_entropy" in step.metrics
            if step.number == 2:
                break
        evaluation = trainer.evaluate(TASKS[4:])
        assert (evaluation.step, evaluation.n_tasks) == (2, 4)
        assert evaluation.name == "adhoc"
        assert trainer.evaluate(TASKS[4:]).name == "adhoc"
        assert trainer.evaluate(TASKS[5:]).name == "adhoc_2"
        with pytest.raises(sf.ConfigError, match="a set of that name with other tasks"):
            trainer.evaluate(TASKS[5:], name="adhoc")
        assert trainer.save().name == "global_step_2"
    assert trainer.result.step == 2
    with pytest.raises(sf.ConfigError, match=r"use it inside `with sf\.Trainer"):
        trainer.save()


async def test_a_trainer_iterates_in_an_asyncio_program() -> None:
    loops: set[Any] = set()

    async def reward(answer: str) -> float:
        loops.add(asyncio.get_running_loop())
        return 0.0

    arguments = {**SMALL, "tasks": TASKS[:4], "eval": False, "steps": 1}
    async with sf.Trainer("tiny", reward=reward, **arguments) as trainer:
        assert [step.number async for step in trainer] == [1]
    assert loops == {asyncio.get_running_loop()}


async def test_sync_functions_work_where_a_loop_is_running() -> None:
    evaluation = sf.evaluate("null", reward=length, tasks=TASKS)
    assert evaluation.n_tasks == 8


def test_an_algorithm_of_ones_own_is_named_in_the_configuration() -> None:
    called: list[int] = []

    @sf.estimator
    def centred(rewards: list[float]) -> list[float]:
        called.append(len(rewards))
        return [reward - sum(rewards) / len(rewards) for reward in rewards]

    @sf.loss(metrics=["weight"])
    def weighted(inputs: sf.LossInputs, *, scale: float = 1.0) -> sf.LossOutput:
        loss_T = -scale * inputs.logprobs_T * inputs.advantages_T
        return sf.LossOutput(loss_T=loss_T, metrics_T={"weight": loss_T.detach()})

    algorithm = sf.GRPO(group_size=2, kl=0, advantage=centred, loss=weighted(scale=0.5))
    arguments = {**SMALL, "algorithm": algorithm, "tasks": TASKS[:4], "eval": False, "steps": 1}
    trained = sf.train("tiny", reward=length, **arguments)
    assert set(called) == {2}
    assert trained.run.config["trainer.algorithm.policy_loss_kwargs"] == {"scale": 0.5}
    assert trained.run.config["trainer.algorithm.policy_loss_type"].endswith(":weighted")


def test_ctrl_c_saves_and_returns_a_partial_result_which_resumes() -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(step: Any) -> None:
        if step.number == 1:
            signal.pthread_kill(main, signal.SIGINT)
            # The cancellation takes effect at the next await of the loop.
            threading.Event().wait(0.5)

    arguments = {**SMALL, "tasks": TASKS[:4], "eval": False, "steps": 3, "run_dir": "runs/cut"}
    stopped = sf.train("tiny", reward=length, on_step=interrupt, **arguments)
    assert stopped.interrupted
    assert stopped.step < 3
    assert "interrupted" in repr(stopped)
    assert "can be resumed" in str(stopped.comparison)
    assert sf.train("tiny", reward=length, **arguments).step == 3


def test_a_second_ctrl_c_does_not_wait() -> None:
    """In a process of its own: the background loop is left with the coroutine."""
    code = """
import asyncio, os, signal
from skyfleet.api.background import run_sync
from skyfleet.api.terminating import exit_after_saving
async def stubborn():
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            os.kill(os.getpid(), signal.SIGINT)
try:
    run_sync(stubborn())
except KeyboardInterrupt:
    print("gave up")
"""
    source = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=source
    )
    assert done.stdout.strip() == "gave up"


def test_a_callback_may_use_the_sync_functions() -> None:
    rates: list[float | None] = []

    def on_step(step: Any) -> None:
        rates.append(sf.evaluate("null", reward=length, tasks=TASKS).success_rate)

    arguments = {**SMALL, "tasks": TASKS[:4], "eval": False, "steps": 1}
    sf.train("tiny", reward=length, on_step=on_step, **arguments)
    assert rates == [0.0]


@pytest.fixture
def default_signals() -> Iterator[None]:
    """As in a script: the test runner may have set others."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in TERMINATION}
    yield
    assert [signal.getsignal(number) for number in TERMINATION] == [signal.SIG_DFL] * 2
    for number, handler in before.items():
        signal.signal(number, handler)


TERMINATION = (signal.SIGTERM, signal.SIGHUP)


@pytest.mark.usefixtures("default_signals")
def test_sigterm_saves_and_exits_with_143(capsys: pytest.CaptureFixture[str]) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def terminate(step: Any) -> None:
        if step.number == 2:
            signal.pthread_kill(main, signal.SIGTERM)
            threading.Event().wait(0.5)

    arguments = {**SMALL, "tasks": TASKS[:4], "eval": False, "steps": 9, "run_dir": "runs/ended"}
    with pytest.raises(SystemExit) as exited:
        sf.train("tiny", reward=length, on_step=terminate, **arguments)
    assert exited.value.code == 128 + signal.SIGTERM
    assert max(sf.load_run("runs/ended").checkpoints) >= 2
    printed = capsys.readouterr().out
    assert "saving a checkpoint; press Ctrl-C again to stop at once" in printed
    assert "To resume, repeat the call with run_dir='runs/ended'." in printed


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.exhaustive)]
)
def test_a_signal_in_the_body_of_a_trainer_loop_saves_and_exits(number: signal.Signals) -> None:
    arguments = {**SMALL, "tasks": TASKS[:4], "eval": False, "steps": 5}
    trainer = sf.Trainer("tiny", reward=length, **arguments)

    def ended() -> None:
        with trainer:
            for _ in trainer:
                signal.raise_signal(number)

    with pytest.raises(SystemExit) as exited:
        ended()
    assert exited.value.code == 128 + number
    assert list(trainer.result.run.checkpoints) == [0, 1]


def test_a_signal_that_the_program_handles_is_left_to_it() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with exit_after_saving():
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_break_saves_the_steps_that_were_trained() -> None:
    arguments = {**SMALL, "tasks": TASKS[:4], "eval": False, "steps": 5}
    with sf.Trainer("tiny", reward=length, **arguments) as trainer:
        for step in trainer:
            if step.number == 2:
                break
    assert list(trainer.result.run.checkpoints) == [0, 2]


def test_ctrl_c_in_the_body_of_a_trainer_loop_saves() -> None:
    arguments = {**SMALL, "tasks": TASKS[:4], "eval": False, "steps": 5}
    trainer = sf.Trainer("tiny", reward=length, **arguments)

    def interrupted() -> None:
        with trainer:
            for _ in trainer:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(trainer.result.run.checkpoints) == [0, 1]


def test_the_signature_lists_the_arguments() -> None:
    for function in (sf.train, sf.train_async, sf.Trainer):
        parameters = inspect.signature(function).parameters
        assert {"model", "env", "tasks", "lr", "steps", "on_step"} <= set(parameters)
    assert {"model", "env", "tasks", "attempts"} <= set(inspect.signature(sf.evaluate).parameters)


def test_an_error_of_the_coroutine_is_raised_where_it_was_called() -> None:
    async def fail() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        run_sync(fail())
