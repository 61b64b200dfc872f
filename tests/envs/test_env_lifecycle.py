"""An env that is opened is closed, whatever happens in between."""

from __future__ import annotations

import pytest
from tests.fakes.counter_env import TASK, CounterEnv, opening

from skyfleet.envs.lifecycle import opened
from skyfleet.envs.registry import env_factory
from skyfleet.envs.worlds.catalog import open_world
from skyfleet.errors import ConfigError, EnvError, VerifierError, blamed_on


async def test_an_env_is_closed_after_an_error_inside() -> None:
    env = CounterEnv()
    with pytest.raises(KeyError):
        async with opened(opening(env), TASK):
            raise KeyError("inside")
    assert env.closed == 1


async def test_an_env_that_will_not_open_is_named() -> None:
    with pytest.raises(EnvError, match=r"^opening counter: OSError: it broke$"):
        async with opened(opening(CounterEnv(breaks="open")), TASK):
            pytest.fail("there is no env")


async def test_a_close_that_hangs_is_left_behind_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = CounterEnv(breaks="close", hangs=True)
    async with opened(opening(env), TASK, close_timeout_seconds=0.01):
        pass
    assert "closing counter for task t: TimeoutError()" in caplog.text


def test_blame_names_the_deed_and_keeps_names_already_given() -> None:
    with pytest.raises(EnvError, match=r"^step: ValueError: odd$"), blamed_on(EnvError, "step"):
        raise ValueError("odd")
    with pytest.raises(VerifierError, match=r"^mine$"), blamed_on(EnvError, "step"):
        raise VerifierError("mine")
    with pytest.raises(KeyboardInterrupt), blamed_on(EnvError, "step"):
        raise KeyboardInterrupt


def test_an_env_class_is_a_known_name_or_a_function_of_your_own() -> None:
    assert env_factory("world") is open_world
    own: object = env_factory("tests.fakes.counter_env:opening")
    assert own is opening


@pytest.mark.parametrize(
    ("env_class", "sentence"),
    [
        ("wrold", "environment.env_class='wrold' is unknown; did you mean 'world'?"),
        ("zzz", r"environment.env_class='zzz' is unknown; known: \['world'\]"),
        ("tests.no_such_room:f", "'tests.no_such_room:f' cannot be imported: No module"),
        ("tests.fakes.counter_env:f", "'tests.fakes.counter_env:f' cannot be imported: module"),
        (":f", "environment.env_class=':f' cannot be imported"),
        (".worlds:f", "environment.env_class='.worlds:f' cannot be imported"),
    ],
)
def test_an_env_class_that_cannot_be_found_is_one_sentence(env_class: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        env_factory(env_class)
