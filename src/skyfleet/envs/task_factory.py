"""The task factory of event loops that run environments: it guards the tasks that they start."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from skyfleet.envs.guarded_call import GuardedCall, is_ctrl_c
from skyfleet.envs.stalls import EnvInterrupt, find_monitor
from skyfleet.envs.values import describe_error
from skyfleet.errors import EnvError

if TYPE_CHECKING:
    from skyfleet.envs.guard import EnvGuard

current_guard: ContextVar[EnvGuard | None] = ContextVar("current_guard", default=None)
"""The guard whose environment is being called; tasks that the environment starts inherit it."""


def install_task_factory(loop: asyncio.AbstractEventLoop) -> None:
    """Drive the tasks that environments start: sys.exit in one would end the event loop."""
    present = loop.get_task_factory()
    if getattr(present, "guards_environments", False):
        return

    def create(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        guard = current_guard.get()
        is_inner = guard is not None and inspect.iscoroutine(coro)
        run = _run_inner(guard, coro) if guard is not None and is_inner else coro
        if present is not None:
            task = present(loop, run, **options)
        else:
            task = asyncio.Task(run, loop=loop, **options)
        if is_inner:
            # A task that is cancelled before it starts never reaches the coroutine.
            task.add_done_callback(lambda _: coro.close())
        return task

    create.guards_environments = True  # type: ignore[attr-defined]
    loop.set_task_factory(create)


async def _run_inner(guard: EnvGuard, coro: Coroutine[Any, Any, Any]) -> Any:
    task = asyncio.current_task()
    assert task is not None
    monitor = find_monitor()  # not the guard's: it may belong to another event loop
    call = GuardedCall(guard, monitor, task, task.cancelling(), coro)
    try:
        is_over, result = call.start()
        return result if is_over else await call.drive(result)
    except (SystemExit, KeyboardInterrupt, EnvInterrupt) as error:
        if is_ctrl_c(error):
            raise
        raise EnvError(f"a task of the environment: {describe_error(error)}") from None
