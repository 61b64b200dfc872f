"""An environment that is opened is always closed."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from tests.fakes.counter_env import TASK, CounterEnv, make_factory

from skyfleet.envs.env import open_env_until
from skyfleet.errors import EnvError, VerifierError, wrap_errors


async def test_an_env_is_closed_after_an_error_inside() -> None:
    env = CounterEnv()

    async def broken() -> None:
        async with AsyncExitStack() as closing:
            await open_env_until(closing, make_factory(env), TASK)
            raise KeyError("inside")

    with pytest.raises(KeyError):
        await broken()
    assert env.closed == 1


async def test_an_env_that_will_not_open_is_named() -> None:
    with pytest.raises(EnvError, match=r"^opening counter: OSError: it broke$"):
        await open_env_until(AsyncExitStack(), make_factory(CounterEnv(breaks="open")), TASK)


async def test_a_close_that_hangs_is_abandoned_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = CounterEnv(breaks="close", hangs=True)
    async with AsyncExitStack() as closing:
        await open_env_until(closing, make_factory(env), TASK, close_timeout_seconds=0.01)
    assert "closing counter for task t: not finished after 0.01 s" in caplog.text


def test_wrap_errors_names_the_stage_and_keeps_episode_errors() -> None:
    with pytest.raises(EnvError, match=r"^step: ValueError: odd$"), wrap_errors(EnvError, "step"):
        raise ValueError("odd")
    with pytest.raises(VerifierError, match=r"^mine$"), wrap_errors(EnvError, "step"):
        raise VerifierError("mine")
    with pytest.raises(KeyboardInterrupt), wrap_errors(EnvError, "step"):
        raise KeyboardInterrupt
