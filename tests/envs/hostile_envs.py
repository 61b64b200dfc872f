"""Environments that misbehave: one kind each, with the ending that its episode must have.

`run_kind` plays one episode of a kind among healthy ones. The kinds under `PROCESS` end or freeze
whatever process they run in, so they are played with `environment.isolation=process`.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any
from unittest.mock import Mock

import numpy as np
from tests.fakes.chars import CharRenderer
from tests.fakes.counter_env import PRESS
from tests.fakes.scripted_engine import ScriptedEngine

from skyfleet.chat.message import Image, Message, Text, ToolCall, ToolSpec
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs import python_env, python_episode
from skyfleet.envs.env import Env, EnvFactory, Observation, Step
from skyfleet.envs.guard import Isolation, Mode
from skyfleet.envs.isolation import isolate
from skyfleet.envs.python_env import as_env_factory
from skyfleet.errors import ConfigError, EnvError
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Ending, Trajectory

LIMIT_SECONDS = 0.8
CLOSE_SECONDS = 0.4
N_SIBLINGS = 4
USER = Message(role="user", content="reach 3")
PASSED = Grade(reward=1.0, success=True)
MEGABYTE = 1_000_000
HUGE = 50 * MEGABYTE
Method = Callable[..., Any]


class Base:
    """Healthy: the agent presses a button by three, then detail that it is done."""

    def __init__(self) -> None:
        self.count = 0

    async def reset(self) -> Any:
        return Observation(messages=(USER,), tools=(PRESS_TOOL,))

    async def step(self, action: Message) -> Any:
        if not action.tool_calls:
            return Step(done=True)
        self.count += int(action.tool_calls[0].arguments["by"])
        return Step(messages=(Message(role="tool", content=str(self.count)),))

    async def grade(self) -> Any:
        return Grade(reward=float(self.count == 3), success=self.count == 3)

    async def close(self) -> Any: ...


PRESS_TOOL = ToolSpec(name="press", description="Press.", parameters={"type": "object"})


class Sibling(Base):
    """Takes a few turns of the event loop, and half of its time limit."""

    async def step(self, action: Message) -> Any:
        for _ in range(5):
            await asyncio.sleep(LIMIT_SECONDS / 40)
        return await super().step(action)


LIMITS = Limits(
    max_turns=4,
    max_input_length=200_000,
    trajectory_timeout_seconds=LIMIT_SECONDS,
    close_timeout_seconds=CLOSE_SECONDS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    name: str
    open_env: EnvFactory
    ending: Ending
    reward: float | None
    detail: str
    """A pattern in the recorded failure; empty: there is none, or any."""
    may_time_out: bool = False
    """Whether its time limit may end it first; it is graded then."""
    mode: Mode = "auto"
    limits: Limits = LIMITS


KINDS: dict[str, Kind] = {}


def add(
    name: str,
    methods: dict[str, Method] | EnvFactory,
    ending: Ending = Ending.FAILED,
    reward: float | None = None,
    detail: str = "",
    **others: Any,
) -> None:
    assert name not in KINDS, name
    if isinstance(methods, dict):
        made = type("Hostile", (Base,), methods)

        async def open_env(task: Task) -> Env:
            env: Env = made()
            return env

        opened: EnvFactory = open_env
    else:
        opened = methods
    KINDS[name] = Kind(
        name=name, open_env=opened, ending=ending, reward=reward, detail=detail, **others
    )


def returning(value: Callable[[], Any]) -> Method:
    async def method(self: Any, *_: Any) -> Any:
        return value()

    return method


def raising(error: Callable[[], BaseException]) -> Method:
    async def method(self: Any, *_: Any) -> Any:
        raise error()

    return method


def doing(act: Callable[[], Any]) -> Method:
    """Block the thread, then go on as a healthy environment would."""

    async def method(self: Any, *_: Any) -> Any:
        act()
        return Step()

    return method


# --- wrong values -----------------------------------------------------------------------------


class Text2(str):
    def __str__(self) -> str:
        return "other"


class Unprintable:
    def __repr__(self) -> str:
        raise SystemExit("no repr")


class Endless(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield USER


def endless() -> Iterator[Message]:
    while True:
        yield USER


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["x"] = value
    return value


def seen(*messages: Any, **others: Any) -> Any:
    return Observation(messages=messages, **others)


def tool(**others: Any) -> Any:
    fields: dict[str, Any] = {"name": "t", "description": "", "parameters": {}, **others}
    return seen(USER, tools=(ToolSpec(**fields),))


OBSERVATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: None, "not an Observation"),
    "text": (lambda: "hello", "not an Observation"),
    "unprintable": (Unprintable, "a Unprintable"),
    "huge text": (lambda: "x" * HUGE, "not an Observation"),
    "no messages": (lambda: seen(), "without messages"),
    "messages none": (lambda: Observation(messages=None), "messages is None"),  # type: ignore[arg-type]
    "messages text": (lambda: Observation(messages="hi"), "messages is 'hi'"),  # type: ignore[arg-type]
    "messages set": (lambda: Observation(messages={USER.text}), "return a tuple"),  # type: ignore[arg-type]
    "messages endless generator": (lambda: Observation(messages=endless()), "return a tuple"),  # type: ignore[arg-type]
    "messages endless list": (lambda: Observation(messages=Endless([USER])), "more than 10,000"),  # type: ignore[arg-type]
    "messages 100,000": (lambda: seen(*[USER] * 100_000), "100,000 entries"),
    "message none": (lambda: seen(None), "among its messages"),
    "message dict": (lambda: seen({"role": "user"}), "among its messages"),
    "content none": (lambda: seen(replace(USER, content=None)), "content is None"),  # type: ignore[arg-type]
    "content bytes": (lambda: seen(replace(USER, content=b"hi")), "content is b'hi'"),  # type: ignore[arg-type]
    "content number": (lambda: seen(replace(USER, content=7)), "content is 7"),  # type: ignore[arg-type]
    "content set": (lambda: seen(replace(USER, content={"a"})), "content is"),  # type: ignore[arg-type]
    "content of texts": (lambda: seen(replace(USER, content=("a",))), "use Text"),  # type: ignore[arg-type]
    "content part none": (lambda: seen(replace(USER, content=(Text(None),))), "text is None"),  # type: ignore[arg-type]
    "image of text": (lambda: seen(replace(USER, content=(Image("x"),))), "use Text"),  # type: ignore[arg-type]
    "role none": (lambda: seen(replace(USER, role=None)), "role is None"),  # type: ignore[arg-type]
    "role unknown": (lambda: seen(replace(USER, role="robot")), "role is 'robot'"),  # type: ignore[arg-type]
    "role list": (lambda: seen(replace(USER, role=["user"])), "role is"),  # type: ignore[arg-type]
    "reasoning number": (lambda: seen(replace(USER, reasoning=1)), "reasoning is 1"),  # type: ignore[arg-type]
    "calls none": (lambda: seen(replace(USER, tool_calls=None)), "tool_calls is None"),  # type: ignore[arg-type]
    "call dict": (lambda: seen(replace(USER, tool_calls=({},))), "not a ToolCall"),  # type: ignore[arg-type]
    "call arguments set": (
        lambda: seen(replace(USER, tool_calls=(ToolCall(id="1", name="x", arguments={"a": {1}}),))),
        "not JSON",
    ),
    "call id bytes": (lambda: seen(replace(USER, tool_call_id=b"1")), "tool_call_id is b'1'"),  # type: ignore[arg-type]
    "is_error text": (lambda: seen(replace(USER, is_error="no")), "is_error is 'no'"),  # type: ignore[arg-type]
    "tools none": (lambda: seen(USER, tools=None), "tools is None"),
    "tools dict": (lambda: seen(USER, tools={"a": 1}), "tools is"),
    "tools of functions": (lambda: seen(USER, tools=(print,)), "not a ToolSpec"),
    "tools 5,000": (
        lambda: seen(USER, tools=tuple(replace(PRESS_TOOL, name=f"t{i}") for i in range(5000))),
        "5,000 entries",
    ),
    "tools twice": (lambda: seen(USER, tools=(PRESS_TOOL, PRESS_TOOL)), "two tools named"),
    "tool name none": (lambda: tool(name=None), "name is None"),
    "tool name empty": (lambda: tool(name=""), "name is ''"),
    "tool description none": (lambda: tool(description=None), "description is None"),
    "tool description huge": (lambda: tool(description="x" * HUGE), "50,000,000 characters"),
    "schema none": (lambda: tool(parameters=None), "parameters is None"),
    "schema with a set": (lambda: tool(parameters={"required": {"a"}}), "not JSON"),
    "schema with bytes": (lambda: tool(parameters={"a": b"x"}), "not JSON"),
    "schema with nan": (lambda: tool(parameters={"a": math.nan}), "not JSON"),
    "schema cyclic": (lambda: tool(parameters=cyclic()), "deeper than 100"),
    "schema deep": (lambda: tool(parameters=nested(50_000)), "deeper than 100"),
    "schema huge": (lambda: tool(parameters={"a": "x" * HUGE}), "larger than"),
    "schema key object": (lambda: tool(parameters={object(): 1}), "has the key"),
    "native text": (lambda: seen(USER, use_native_tool_calling="no"), "is 'no'"),
}
for name, (value, detail) in OBSERVATIONS.items():
    add(f"reset returns: {name}", {"reset": returning(value)}, detail=detail)


def step(**fields: Any) -> Callable[[], Any]:
    return lambda: Step(**fields)


STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: None, "not a Step"),
    "gym's tuple": (lambda: ("obs", 1.0, False, {}), "not a Step"),
    "a coroutine function": (lambda: endless, "not a Step"),
    "messages none": (step(messages=None), "messages is None"),
    "message of bytes": (step(messages=(replace(USER, content=b""),)), "content is b''"),  # type: ignore[arg-type]
    "done none": (step(done=None), "done is None"),
    "done text": (step(done="false"), "done is 'false'"),
    "done array": (lambda: Step(done=np.zeros(3)), "done is"),  # type: ignore[arg-type]
    "reward none": (step(reward=None), "the reward None"),
    "reward nan": (step(reward=math.nan), "the reward nan"),
    "reward infinite": (step(reward=-math.inf), "the reward -inf"),
    "reward text": (step(reward="1"), "the reward '1'"),
    "reward complex": (step(reward=1j), "the reward 1j"),
    "reward array": (lambda: Step(reward=np.ones(2)), "the reward"),  # type: ignore[arg-type]
    "reward too large": (step(reward=10**400), "the reward 1000"),
    "info none": (step(info=None), "info=None"),
    "info list": (step(info=[1]), r"info=\[1\]"),
    "info of 100,000": (step(info={str(i): 1.0 for i in range(100_000)}), "more than 1,000"),
    "turns negative": (step(keep_recent_turns=-1), "keep_recent_turns is -1"),
    "turns text": (step(keep_recent_turns="2"), "keep_recent_turns is '2'"),
    "opening text": (step(opening="x"), "not an Observation"),
    "opening empty": (lambda: Step(opening=seen()), "without messages"),
    "success text": (step(success="no"), "success is 'no'"),
}
for name, (value, detail) in STEPS.items():
    add(f"step returns: {name}", {"step": returning(value)}, detail=detail)


def grade(**fields: Any) -> Callable[[], Any]:
    return lambda: Grade(**{"reward": 1.0, "success": True, **fields})


GRADES: dict[str, tuple[Callable[[], Any], str]] = {
    "a number": (lambda: 1.0, "return a Grade"),
    "a dict": (lambda: {"reward": 1.0}, "return a Grade"),
    "reward nan": (grade(reward=math.nan), "the reward nan"),
    "reward infinite": (grade(reward=math.inf), "the reward inf"),
    "reward text": (grade(reward="1"), "the reward '1'"),
    "reward none": (grade(reward=None), "the reward None"),
    "reward too large": (grade(reward=10**400), "the reward 1000"),
    "success none": (grade(success=None), "success is None"),
    "success text": (grade(success="false"), "success is 'false'"),
    "parts none": (grade(parts=None), "parts is None"),
    "parts text": (grade(parts={"a": "b"}), r"parts\['a'\] is 'b'"),
    "parts nan": (grade(parts={"a": math.nan}), r"parts\['a'\] is nan"),
    "parts of 100,000": (grade(parts={str(i): 1.0 for i in range(100_000)}), "more than 1,000"),
    "explanation none": (grade(explanation=None), "explanation is None"),
    "explanation bytes": (grade(explanation=b"x"), "explanation is b'x'"),
}
for name, (value, detail) in GRADES.items():
    add(f"grade returns: {name}", {"grade": returning(value)}, Ending.DONE, None, detail)


# --- odd values that are converted ------------------------------------------------------------


class OwnMessage(Message):
    pass


async def mutates_later(self: Any, action: Message) -> Any:
    messages = [replace(USER, content="3")]
    asyncio.get_running_loop().call_soon(messages.clear)
    return Step(messages=messages, done=True)  # type: ignore[arg-type]


CONVERTED: dict[str, dict[str, Method]] = {
    "numbers of numpy": {
        "step": returning(
            lambda: Step(done=np.bool_(True), reward=np.float32(0), info={"n": np.int64(3)})  # type: ignore[arg-type, dict-item]
        ),
        "grade": returning(lambda: Grade(reward=np.float64(1), success=np.bool_(True))),  # type: ignore[arg-type]
    },
    "arrays without axes": {
        "grade": returning(lambda: Grade(reward=np.array(1.0), success=np.array(True))),  # type: ignore[arg-type]
    },
    "fraction": {"grade": returning(lambda: Grade(reward=Fraction(1), success=True))},  # type: ignore[arg-type]
    "list of messages": {"reset": returning(lambda: Observation(messages=[USER]))},  # type: ignore[arg-type]
    "subclass of str": {"reset": returning(lambda: seen(replace(USER, content=Text2("go"))))},
    "subclass of Message": {"reset": returning(lambda: seen(OwnMessage(role="user", content="x")))},
    "info nan": {"step": returning(lambda: Step(done=True, info={"a": math.nan}))},
    "info of objects": {"step": returning(lambda: Step(done=True, info={"a": object(), "b": 1}))},  # type: ignore[dict-item]
    "info with odd names": {"step": returning(lambda: Step(done=True, info={1: 2.0, None: 3}))},  # type: ignore[dict-item]
    "message list that changes later": {"step": mutates_later},
    "schema with tuples and numpy": {
        "reset": returning(lambda: tool(parameters={"enum": (np.int64(1), "a"), 1: 2}))
    },
    "half a surrogate pair": {"reset": returning(lambda: seen(replace(USER, content="a\ud83d")))},
    "null characters": {"reset": returning(lambda: seen(replace(USER, content="\0" * 10)))},
    "explanation of 50 MB": {"grade": returning(grade(explanation="x" * HUGE))},
}
for name, methods in CONVERTED.items():
    passed = {"grade": returning(lambda: PASSED), **methods}
    add(f"converted: {name}", passed, Ending.DONE, 1.0)
add("converted: decimal", {"grade": returning(grade(reward=Decimal(1)))}, Ending.DONE, None, "1")
add(
    "converted: mock of a Step",
    {"step": returning(lambda: Mock(spec=Step, messages=()))},
    detail="step",
)


# --- exceptions -------------------------------------------------------------------------------


class SilentError(Exception):
    def __str__(self) -> str:
        raise SystemExit


class Own(BaseException):
    pass


ERRORS: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "its own BaseException": Own,
    "BaseExceptionGroup": lambda: BaseExceptionGroup("many", [SystemExit(), Own()]),
    "StopIteration": lambda: StopIteration(Step()),
    "StopAsyncIteration": StopAsyncIteration,
    "MemoryError": MemoryError,
    "TimeoutError": TimeoutError,
    "ConfigError": lambda: ConfigError("no such key"),
    "an error without text": SilentError,
    "an error of 50 MB": lambda: ValueError("x" * HUGE),
}
for name, error in ERRORS.items():
    add(f"step raises: {name}", {"step": raising(error)})
for name in ("SystemExit", "KeyboardInterrupt", "CancelledError", "GeneratorExit"):
    add(f"reset raises: {name}", {"reset": raising(ERRORS[name])})
    add(f"grade raises: {name}", {"grade": raising(ERRORS[name])}, Ending.DONE)
    add(f"close raises: {name}", {"close": raising(ERRORS[name])}, Ending.DONE, 1.0)


def recurse() -> None:
    recurse()


add("step recurses", {"step": doing(recurse)}, detail="RecursionError")


async def open_exits(task: Task) -> Env:
    sys.exit(1)


async def open_none(task: Task) -> Any:
    return None


def open_sync(task: Task) -> Any:
    return Base()


async def open_hangs(task: Task) -> Any:
    await asyncio.sleep(60)


add("open exits", open_exits, detail="opening hostile: SystemExit")
add("open returns none", open_none, detail="not an environment")
add("open is not async", open_sync, detail="await")
add("open hangs", open_hangs, detail="opening hostile: not finished")
add("reset is not async", {"reset": lambda self: seen(USER)}, detail="await")
add("step takes nothing", {"step": returning(Step).__get__(None, Base)}, Ending.MAX_TURNS, 0.0)
add("grade is a property", {"grade": property(lambda self: sys.exit(2))}, Ending.DONE)  # type: ignore[dict-item]
add("reset is a property", {"reset": property(lambda self: sys.exit(2))}, detail="SystemExit")  # type: ignore[dict-item]
add("no close", {"close": None}, Ending.DONE, 1.0)  # type: ignore[dict-item]
add("no grade", {"grade": None}, Ending.DONE, 0.0)  # type: ignore[dict-item]


# --- cancellation -----------------------------------------------------------------------------


async def waits_for_cancelled(self: Any, *_: Any) -> Any:
    inner = asyncio.create_task(asyncio.sleep(5))
    inner.cancel()
    await inner


async def cancels_itself(self: Any, *_: Any) -> Any:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)
    return Step()


async def cancels_itself_and_returns(self: Any, *_: Any) -> Any:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    return Step()


async def cancels_itself_and_raises(self: Any, *_: Any) -> Any:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    raise asyncio.CancelledError


async def is_cancelled_by_a_child(self: Any, *_: Any) -> Any:
    parent = asyncio.current_task()
    assert parent is not None

    async def child() -> None:
        parent.cancel()

    await asyncio.gather(asyncio.create_task(child()), asyncio.sleep(5))


async def swallows_once(self: Any, *_: Any) -> Any:
    try:
        await asyncio.sleep(5)
    except asyncio.CancelledError:
        return Step()


async def swallows(self: Any, *_: Any) -> Any:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


async def swallows_all(self: Any, *_: Any) -> Any:
    while True:
        with suppress(BaseException):
            await asyncio.sleep(0.05)


async def uncancels(self: Any, *_: Any) -> Any:
    current = asyncio.current_task()
    assert current is not None
    while True:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            current.uncancel()


async def waits_for_a_child_that_swallows(self: Any, *_: Any) -> Any:
    await asyncio.create_task(swallows(self))


async def gathers_children_that_swallow(self: Any, *_: Any) -> Any:
    await asyncio.gather(swallows(self), swallows_all(self))


async def shields(self: Any, *_: Any) -> Any:
    await asyncio.shield(asyncio.sleep(2))


async def yields_for_ever(self: Any, *_: Any) -> Any:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def iterates_for_ever(self: Any, *_: Any) -> Any:
    async def numbers() -> Any:
        while True:
            await asyncio.sleep(0)
            yield 1

    return sum([n async for n in numbers()])


async def waits_for_nothing(self: Any, *_: Any) -> Any:
    await asyncio.get_running_loop().create_future()


async def waits_for_a_future_of_another_loop(self: Any, *_: Any) -> Any:
    other = asyncio.new_event_loop()
    try:
        await other.create_future()
    finally:
        other.close()


class BadAwaitable:
    def __await__(self) -> Iterator[Any]:
        yield 7


async def yields_a_number(self: Any, *_: Any) -> Any:
    await BadAwaitable()  # type: ignore[misc]


async def cleans_up_for_ever(self: Any, *_: Any) -> Any:
    try:
        await asyncio.sleep(60)
    finally:
        await swallows_all(self)


async def cancels_itself_and_goes_on(self: Any, *_: Any) -> Any:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    await asyncio.sleep(60)


async def gathers_and_swallows(self: Any, *_: Any) -> Any:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.gather(asyncio.sleep(60))


async def leaves_a_task_group(self: Any) -> Any:
    async def read() -> None:
        await asyncio.sleep(0.01)
        raise ConnectionError("while the agent generates")

    self.group = asyncio.TaskGroup()
    await self.group.__aenter__()
    self.group.create_task(read())
    return await Base.reset(self)


async def leaves_a_time_limit(self: Any) -> Any:
    self.limit = asyncio.timeout(0.01)
    await self.limit.__aenter__()
    return await Base.reset(self)


async def cancels_without_end(self: Any) -> Any:
    current, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert current is not None

    def cancel() -> None:  # as a cancelled scope of anyio does
        if not current.done():
            current.cancel()
            loop.call_soon(cancel)

    loop.call_later(0.01, cancel)
    return await Base.reset(self)


OVER = "not finished after"
ABANDONED = "ignored its cancellation"
for name, method, ending, reward, detail in (
    ("waits for a cancelled task", waits_for_cancelled, Ending.FAILED, None, "CancelledError"),
    ("cancels its own task", cancels_itself, Ending.FAILED, None, "cancelled the task"),
    ("cancels and returns", cancels_itself_and_returns, Ending.FAILED, None, "cancelled the task"),
    ("cancels and raises", cancels_itself_and_raises, Ending.FAILED, None, "cancelled the task"),
    ("is cancelled by a child", is_cancelled_by_a_child, Ending.FAILED, None, "cancelled the task"),
    ("swallows one cancellation", swallows_once, Ending.TIMEOUT, 0.0, OVER),
    ("swallows cancellation", swallows, Ending.FAILED, None, ABANDONED),
    ("swallows everything", swallows_all, Ending.FAILED, None, ABANDONED),
    ("uncancels", uncancels, Ending.FAILED, None, ""),
    ("child swallows", waits_for_a_child_that_swallows, Ending.FAILED, None, ABANDONED),
    ("gathered children swallow", gathers_children_that_swallow, Ending.FAILED, None, ABANDONED),
    ("shields", shields, Ending.TIMEOUT, 0.0, OVER),
    ("yields for ever", yields_for_ever, Ending.TIMEOUT, 0.0, OVER),
    ("iterates for ever", iterates_for_ever, Ending.TIMEOUT, 0.0, OVER),
    ("waits for nothing", waits_for_nothing, Ending.TIMEOUT, 0.0, OVER),
    ("waits for another loop", waits_for_a_future_of_another_loop, Ending.FAILED, None, "loop"),
    ("awaits a bad object", yields_a_number, Ending.FAILED, None, "bad yield"),
    ("cleans up for ever", cleans_up_for_ever, Ending.FAILED, None, ABANDONED),
    ("gathers and swallows", gathers_and_swallows, Ending.FAILED, None, ABANDONED),
):
    add(f"step {name}", {"step": method}, ending, reward, detail)
add(
    "step cancels itself and goes on",
    {"step": cancels_itself_and_goes_on},
    Ending.TIMEOUT,
    0.0,
    OVER,
    limits=replace(LIMITS, close_timeout_seconds=30),
)
for name, method in (
    ("leaves a task group that fails", leaves_a_task_group),
    ("leaves a time limit", leaves_a_time_limit),
    ("cancels without end", cancels_without_end),
):
    add(f"reset {name}", {"reset": method}, detail="cancelled the task")
for place in ("reset", "grade", "close"):
    is_reset = place == "reset"
    add(
        f"{place} swallows cancellation",
        {place: swallows},
        Ending.FAILED if is_reset else Ending.DONE,
        1.0 if place == "close" else None,
    )
    add(
        f"{place} waits for nothing",
        {place: waits_for_nothing},
        Ending.FAILED if is_reset else Ending.DONE,
        1.0 if place == "close" else None,
    )


# --- blocking the event loop ------------------------------------------------------------------


def sleep() -> None:
    time.sleep(10 * LIMIT_SECONDS)


def wait_event() -> None:
    threading.Event().wait()


def spin() -> None:
    while True:
        pass


def spin_catching() -> None:
    while True:
        try:
            while True:
                time.sleep(0.01)
        except BaseException:
            pass


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def run_program() -> None:
    subprocess.run(["sleep", "30"], check=True)


def read_pipe() -> None:
    reading, writing = os.pipe()
    try:
        os.read(reading, 1)
    finally:
        os.close(reading)
        os.close(writing)


def join_thread() -> None:
    thread = threading.Thread(target=time.sleep, args=(2,), daemon=True)
    thread.start()
    thread.join()


def drain_generator() -> None:
    for _ in endless():
        pass


HELD = "held its thread"
for name, act in (
    ("sleeps", sleep),
    ("waits for an event", wait_event),
    ("spins", spin),
    ("spins and catches all", spin_catching),
    ("deadlocks", deadlock),
    ("runs a program", run_program),
    ("reads a pipe", read_pipe),
    ("joins a thread", join_thread),
    ("drains an endless generator", drain_generator),
):
    add(f"step blocks: {name}", {"step": doing(act)}, detail=HELD)
add("reset blocks", {"reset": doing(spin)}, detail=HELD)
add("grade blocks", {"grade": doing(wait_event)}, Ending.DONE, None, HELD)
add("close blocks", {"close": doing(spin)}, Ending.DONE, 1.0)


async def open_blocks(task: Task) -> Env:
    wait_event()
    raise AssertionError


async def sleeps_shortly(self: Any, action: Message) -> Any:
    time.sleep(0.3)  # noqa: ASYNC251
    return await Base.step(self, action)


async def child_blocks(self: Any, action: Message) -> Any:
    async def child() -> None:
        time.sleep(10 * LIMIT_SECONDS)  # noqa: ASYNC251

    await asyncio.create_task(child())
    return await Base.step(self, action)


class EndlessItems(dict[str, float]):
    def items(self) -> Any:
        spin()


class EndlessText(Exception):  # noqa: N818
    def __str__(self) -> str:
        spin()
        raise AssertionError


class EndlessEnvError(EnvError):
    __str__ = EndlessText.__str__


add("step blocks a thread: spins", {"step": doing(spin)}, detail=HELD, mode="thread")
add(
    "step blocks a thread: sleeps",
    {"step": doing(lambda: time.sleep(3 * LIMIT_SECONDS))},
    detail=ABANDONED,
    mode="thread",
)
add("open blocks", open_blocks, detail=HELD)


class EndlessRepr:
    def __repr__(self) -> str:
        spin()
        raise AssertionError


async def open_endless(task: Task) -> Any:
    return EndlessRepr()


add("what open returns blocks", open_endless, detail="returned a EndlessRepr")
add("info blocks", {"step": returning(lambda: Step(info=EndlessItems(a=1.0)))}, detail=HELD)
add("error blocks", {"step": raising(EndlessText)}, detail="it has no text")
add("env error blocks", {"step": raising(EndlessEnvError)}, detail="it has no text")
add("step blocks for a short time", {"step": sleeps_shortly}, Ending.DONE, 1.0)
add("child blocks", {"step": child_blocks}, may_time_out=True)


# --- tasks, callbacks and generators left behind -----------------------------------------------


def starting(child: Callable[[], Awaitable[Any]], n: int = 1) -> Method:
    async def method(self: Any, action: Message) -> Any:
        self.children = [asyncio.ensure_future(child()) for _ in range(n)]
        await asyncio.sleep(0.01)
        return await Base.step(self, action)

    return method


async def child_exits() -> None:
    sys.exit(4)


async def child_interrupts() -> None:
    raise KeyboardInterrupt


async def child_fails() -> None:
    raise ValueError("in the background")


async def child_stays() -> None:
    await asyncio.sleep(2)


async def awaits_exit(self: Any, action: Message) -> Any:
    await asyncio.create_task(child_exits())


async def group_exits(self: Any, action: Message) -> Any:
    async with asyncio.TaskGroup() as group:
        group.create_task(child_exits())
        await asyncio.sleep(5)


async def leaves_generator(self: Any, action: Message) -> Any:
    async def numbers() -> Any:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)

    async for _ in numbers():
        break
    return await Base.step(self, action)


async def callback_raises(self: Any, action: Message) -> Any:
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)
    return await Base.step(self, action)


async def callback_blocks(self: Any) -> Any:
    asyncio.get_running_loop().call_later(0.05, time.sleep, 2 * LIMIT_SECONDS)
    return await Base.reset(self)


add("callback blocks", {"reset": callback_blocks}, Ending.DONE, 1.0)
add("child exits", {"step": starting(child_exits)}, Ending.DONE, 1.0)
add("child raises KeyboardInterrupt", {"step": starting(child_interrupts)}, Ending.DONE, 1.0)
add("child fails", {"step": starting(child_fails)}, Ending.DONE, 1.0)
add("children stay", {"step": starting(child_stays, 100)}, Ending.DONE, 1.0)
add("awaits a child that exits", {"step": awaits_exit}, detail="SystemExit")
add("task group exits", {"step": group_exits})
add("leaves an async generator", {"step": leaves_generator}, Ending.DONE, 1.0)
add("callback raises", {"step": callback_raises}, Ending.DONE, 1.0)


# --- sizes ------------------------------------------------------------------------------------


def text_of(n_characters: int) -> tuple[Message, ...]:
    return (replace(USER, content="word " * (n_characters // 5)),)


def stepping(step: Callable[[], Any]) -> Method:
    async def method(self: Any, action: Message) -> Any:
        return step()

    return method


FULL = Ending.CONTEXT_FULL
add("reset of 50 MB", {"reset": returning(lambda: seen(*text_of(HUGE)))}, FULL, 0.0)
add("step of 50 MB", {"step": stepping(lambda: Step(messages=text_of(HUGE)))}, FULL, 0.0)
add("step of 8 MB", {"step": stepping(lambda: Step(messages=text_of(8 * MEGABYTE)))}, FULL, 0.0)
add("step of 1 MB", {"step": stepping(lambda: Step(messages=text_of(MEGABYTE)))}, FULL, 0.0)
add(
    "last step of 50 MB",
    {"step": stepping(lambda: Step(messages=text_of(HUGE), done=True))},
    Ending.DONE,
    0.0,
)
add("restart of 50 MB", {"step": stepping(lambda: Step(opening=seen(*text_of(HUGE))))}, FULL, 0.0)
add(
    "step of 9,000 messages",
    {"step": stepping(lambda: Step(messages=(USER,) * 9000, done=True))},
    Ending.DONE,
    0.0,
)
add(
    "image of 300 MB",
    {
        "step": stepping(
            lambda: Step(messages=(replace(USER, content=(Image(bytes(300 * MEGABYTE)),)),))
        )
    },
    FULL,
    0.0,
)

# --- sync environments ------------------------------------------------------------------------


class SyncBase(python_env.Env):
    def reset(self) -> Any:
        return python_episode.Observation("reach 3")

    def step(self, message: Message) -> Any:
        return Step(done=True)

    def grade(self) -> Any:
        return 1.0


def add_sync(name: str, methods: dict[str, Method], *expected: Any) -> None:
    made = type("HostileSync", (SyncBase,), methods)
    add(f"sync: {name}", as_env_factory(made), *expected)


def acting(act: Callable[[], Any]) -> Method:
    def method(self: Any, *_: Any) -> Any:
        return act()

    return method


add_sync("step spins", {"step": acting(spin)}, Ending.TIMEOUT, None)
add_sync("step sleeps", {"step": acting(sleep)}, Ending.TIMEOUT, None)
add_sync("step stops an iteration", {"step": acting(lambda: next(iter(())))}, Ending.FAILED, None)
add_sync("step exits", {"step": acting(lambda: sys.exit(1))}, Ending.FAILED, None, "SystemExit")
add_sync("reset spins", {"reset": acting(spin)}, Ending.FAILED, None, OVER)
add_sync("reset returns none", {"reset": acting(lambda: None)}, Ending.FAILED, None, "None")
add_sync("reset returns a set", {"reset": acting(lambda: {"a"})}, Ending.FAILED, None, "not a mess")
add_sync("step returns a tuple", {"step": acting(lambda: (1, 2))}, Ending.FAILED, None, "sf.Step")
add_sync("grade is nan", {"grade": acting(lambda: math.nan)}, Ending.DONE, None, "nan")
add_sync("grade is an array", {"grade": acting(lambda: np.array(1.0))}, Ending.DONE, 1.0)
add_sync("grade exits", {"grade": acting(lambda: sys.exit(1))}, Ending.DONE, None, "SystemExit")
add_sync("grade spins", {"grade": acting(spin)}, Ending.DONE, None)
add_sync("close spins", {"close": acting(spin)}, Ending.DONE, 1.0)
add_sync("constructor exits", {"__init__": acting(lambda: sys.exit(1))}, Ending.FAILED, None)


# --- what only a process survives ---------------------------------------------------------------


def exit_at_once() -> None:
    os._exit(9)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def read_address_zero() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def take_memory() -> None:
    held = []
    while True:
        held.append(bytearray(64 * 2**20))


def hold_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def interrupt_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def close_descriptors() -> None:
    os.closerange(3, 256)
    os._exit(0)


def fork() -> None:
    for _ in range(8):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
    os._exit(1)


def print_much() -> None:
    os.write(1, b"")
    sys.stdin.read()


def stop_loop() -> None:
    asyncio.get_running_loop().stop()


def cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


class ProcessEnv(Base):
    act: Callable[[], Any] = staticmethod(lambda: None)

    async def step(self, action: Message) -> Any:
        type(self).act()
        await asyncio.sleep(0.05)
        return await super().step(action)


PROCESS: dict[str, tuple[Callable[[], Any], Ending, float | None, str]] = {
    "exits at once": (exit_at_once, Ending.FAILED, None, "exit code 9"),
    "kills itself": (kill_itself, Ending.FAILED, None, "SIGKILL"),
    "reads address 0": (read_address_zero, Ending.FAILED, None, "SIGSEGV"),
    "takes all memory": (take_memory, Ending.FAILED, None, "MemoryError: .*worker_memory_gb=1.5"),
    "holds the interpreter": (hold_interpreter, Ending.FAILED, None, ""),
    "interrupts itself": (interrupt_itself, Ending.FAILED, None, "cancelled"),
    "closes descriptors": (close_descriptors, Ending.FAILED, None, "ended"),
    "forks and exits": (fork, Ending.FAILED, None, "exit code 1"),
    "stops the loop": (stop_loop, Ending.FAILED, None, "cancelled|ended"),
    "cancels all tasks": (cancel_all, Ending.FAILED, None, ""),
    "raises SystemExit": (lambda: sys.exit(1), Ending.FAILED, None, "SystemExit"),
    "spins": (spin, Ending.FAILED, None, f"{HELD}|{ABANDONED}"),
    "sleeps": (lambda: time.sleep(60), Ending.FAILED, None, f"{HELD}|{ABANDONED}"),
    "reads its input": (print_much, Ending.DONE, 1.0, ""),
}


def open_process_kind(name: str) -> Any:
    return type("Process", (ProcessEnv,), {"act": staticmethod(PROCESS[name][0])})


for name, (_, ending, reward, detail) in PROCESS.items():
    add(
        f"process: {name}",
        as_env_factory(open_process_kind(name)),
        ending,
        reward,
        detail,
        mode="process",
        # A worker starts in a second, which counts as opening the environment.
        limits=replace(LIMITS, trajectory_timeout_seconds=6),
    )


HUGE_KINDS = frozenset(name for name in KINDS if "huge" in name or "50 MB" in name)


# --- playing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    kind: Kind
    trajectory: Trajectory
    sibling_rewards: tuple[float | None, ...]
    seconds: float
    rss_mb: float
    n_threads: int
    n_tasks: int

    @property
    def problems(self) -> list[str]:
        kind, failure = self.kind, self.trajectory.failure
        detail = failure.detail if failure else ""
        found = []
        if kind.may_time_out and self.trajectory.ending is Ending.TIMEOUT:
            kind = replace(kind, ending=Ending.TIMEOUT, reward=0.0)
        if self.trajectory.ending is not kind.ending:
            found.append(f"ending {self.trajectory.ending}, not {kind.ending}")
        if self.trajectory.reward != kind.reward:
            found.append(f"reward {self.trajectory.reward}, not {kind.reward}")
        if kind.detail and not re.search(kind.detail, detail):
            found.append(f"detail {detail[:200]!r}, not {kind.detail!r}")
        if len(detail) > 3000:
            found.append(f"a failure of {len(detail):,} characters")
        if self.sibling_rewards != (1.0,) * N_SIBLINGS:
            found.append(f"siblings {self.sibling_rewards}")
        if self.n_threads:
            found.append(f"{self.n_threads} threads more")
        return found


def start_agent(task: Task, observation: Observation, session: str) -> TokenConversation:
    return TokenConversation(
        observation,
        engine=ScriptedEngine(PRESS % 3, "done", "done", "done", delay=0.02),
        renderer=CharRenderer(),
        sampling=SamplingParams(),
        session=session,
        max_input_length=LIMITS.max_input_length,
    )


async def run_kind(kind: Kind) -> Result:
    """Play one episode of the kind beside healthy ones."""
    return (await run_kinds([kind]))[0]


async def run_kinds(kinds: Sequence[Kind]) -> list[Result]:
    """Play one episode of each kind beside healthy ones, all at once, with the first one's limits."""
    by_key = {kind.name: kind for kind in kinds}
    hostile = [Task(key=kind.name, env_key="hostile", prompt="x") for kind in kinds]
    healthy = [Task(key=f"s{i}", env_key="healthy", prompt="x") for i in range(N_SIBLINGS)]
    isolation = Isolation(mode=kinds[0].mode, worker_memory_gb=1.5)

    async def open_env(task: Task) -> Env:
        if task.env_key == "healthy":
            return Sibling()
        return await isolate(by_key[task.key].open_env)(task)

    # As the registry's: it leaves it to the factories behind it where an environment runs.
    open_env.__module__ = "skyfleet.envs"
    gc.collect()
    threads, tasks = count_threads(), len(asyncio.all_tasks())
    memory, start = resident_megabytes(), time.perf_counter()
    groups = await collect(
        [*hostile, *healthy],
        open_env,
        start_agent,
        replace(kinds[0].limits, isolation=isolation),
        n_samples=1,
        max_concurrent=len(kinds) + N_SIBLINGS,
    )
    seconds = time.perf_counter() - start
    for _ in range(60):  # threads may still be ending
        gc.collect()
        if count_threads() <= threads:
            break
        await asyncio.sleep(0.05)
    return [
        Result(
            kind=kind,
            trajectory=group.trajectories[0],
            sibling_rewards=tuple(g.trajectories[0].reward for g in groups[len(kinds) :]),
            seconds=seconds,
            rss_mb=resident_megabytes() - memory,
            n_threads=max(0, count_threads() - threads),
            n_tasks=len(asyncio.all_tasks()) - tasks,
        )
        for kind, group in zip(kinds, groups, strict=False)
    ]


def count_threads() -> int:
    """All but skyfleet's own, of which there is one each for the whole process."""
    return sum(not thread.name.startswith("skyfleet") for thread in threading.enumerate())


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MEGABYTE
