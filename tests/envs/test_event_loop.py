"""The run goes on after an environment stopped its event loop, and the command exits."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.envs.hostile_envs import KINDS as HOSTILE_KINDS
from tests.envs.hostile_envs import Base, Result, run_kind, spin

from skyfleet.api.background import run_sync
from skyfleet.envs.env import Env, Observation
from skyfleet.envs.event_loop import run_loop
from skyfleet.tasks.task import Task
from skyfleet.trajectories.archive import eval_path, read_trajectories
from skyfleet.trajectories.trajectory import Ending


def raise_exit() -> None:
    sys.exit(6)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def stop() -> None:
    asyncio.get_running_loop().stop()


class SpinningCallback(Base):
    async def reset(self) -> Observation:
        asyncio.get_running_loop().call_soon(spin)
        await asyncio.sleep(0)
        observation: Observation = await super().reset()
        return observation


async def open_spinning(task: Task) -> Env:
    return SpinningCallback()


async def meet(harm: Callable[[], None]) -> str:
    """The harm is done by a callback, which no guard of an environment sees."""
    loop = asyncio.get_running_loop()
    loop.call_soon(harm)
    await asyncio.sleep(0)
    loop.call_later(0.001, harm)
    await asyncio.sleep(0.01)
    return "went on"


@pytest.mark.parametrize("run", [run_loop, run_sync])
@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (raise_exit, f"a callback raised SystemExit at {__file__}:"),
        (raise_interrupt, f"a callback raised KeyboardInterrupt at {__file__}:"),
        (stop, "an environment stopped the event loop of the run, which goes on"),
    ],
)
def test_the_run_goes_on_after_a_callback_that_would_end_it(
    run: Callable[..., str],
    harm: Callable[[], None],
    sentence: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert run(meet(harm)) == "went on"
    assert caplog.text.count(sentence) == 2


@pytest.mark.parametrize("run", [run_loop, run_sync])
def test_an_endless_callback_is_interrupted_and_costs_only_its_own_episode(
    run: Callable[..., Result], caplog: pytest.LogCaptureFixture
) -> None:
    kind = replace(
        HOSTILE_KINDS["callback blocks"], open_env=open_spinning, ending=Ending.TIMEOUT, reward=0.0
    )
    assert run(run_kind(kind)).problems == []
    assert "a callback of environment hostile held the event loop beyond the limit" in caplog.text


def test_what_the_run_itself_raises_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    async def end() -> None:
        sys.exit(3)

    async def wait() -> None:
        await asyncio.ensure_future(end())

    for main in (end, wait):
        with pytest.raises(SystemExit) as exited:
            run_loop(main())
        assert exited.value.code == 3
    assert caplog.text == ""


STUBBORN = """
import asyncio, sys, time
from contextlib import suppress
from skyfleet.chat.message import Message
from skyfleet.envs.env import Observation, Step
from skyfleet.tasks.task import Grade

async def swallow():
    while True:
        with suppress(BaseException):
            await asyncio.sleep(3600)

async def close_streams():
    sys.stdout.close()
    sys.stderr = None

async def iterate():
    while True:
        try:
            yield
        finally:
            await asyncio.sleep(3600)

class Env:
    def __init__(self, task):
        self.kind = task.key

    async def reset(self):
        if self.kind == "swallows":
            await swallow()
        elif self.kind == "a task swallows":
            self.task = asyncio.ensure_future(swallow())
        elif self.kind == "blocks a thread":
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
        elif self.kind == "an async generator":
            self.iterator = iterate()
            await anext(self.iterator)
        elif self.kind == "closes the streams":
            await close_streams()
        return Observation(messages=(Message(role="user", content="go"),))

    async def step(self, action):
        return Step(done=True)

    async def grade(self):
        return Grade(reward=1.0, success=True)

    async def close(self): ...

async def open_env(task):
    return Env(task)
"""
KINDS = (
    "swallows",
    "a task swallows",
    "blocks a thread",
    "an async generator",
    "closes the streams",
    "good",
)


def test_a_command_exits_whatever_environments_leave_behind(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    tasks = [{"key": kind, "env_key": "e", "prompt": "go"} for kind in KINDS]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    keys = (
        "data.val_data={val: [tasks.jsonl]}",
        "environment.env_class=stubborn:open_env",
        "environment.close_timeout_seconds=0.2",
        "generator.trajectory_timeout_seconds=1",
    )
    options = ("--agent", "null", "--output", "out")
    ended = subprocess.run(
        [sys.executable, "-m", "skyfleet", "evaluate", *keys, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "| val" in ended.stdout
    played = read_trajectories(eval_path(tmp_path / "out" / "trajectories", "val", 0))
    rewards = {trajectory.task_key: trajectory.reward for trajectory in played}
    assert rewards == {kind: None if kind == "swallows" else 1.0 for kind in KINDS}
