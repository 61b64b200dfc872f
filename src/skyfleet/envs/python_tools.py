"""Call a user's plain functions: arguments by name, sync or async, and tools from signatures."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, get_type_hints, overload

from pydantic_core import to_jsonable_python

from skyfleet.chat.message import ToolSpec
from skyfleet.envs.env_thread import EnvThread
from skyfleet.envs.tools import Tool
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task

Function = Callable[..., Any]


def requested_names(function: Function, offered: Collection[str], *, where: str) -> tuple[str, ...]:
    """Which of the offered arguments a function takes; ConfigError if it needs any other.

    `where` begins the error: `sf.ToolEnv(reward=score)`.
    """
    if not callable(function):
        raise ConfigError(f"{where}: {function!r:.80} is not a function; pass one")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature, such as dict
        return ()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [p for p in named if p.name not in offered and p.default is p.empty]
    if unknown or any(p.kind is p.POSITIONAL_ONLY for p in named):
        taken = ", ".join(p.name for p in named)
        raise ConfigError(
            f"{where}: {name_function(function)} takes ({taken}); it may take {', '.join(offered)}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return tuple(offered)
    return tuple(p.name for p in named if p.name in offered)


def name_function(function: object) -> str:
    """The function's own name; a partial has the name of its function, an object that of its class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


class EpisodeCalls:
    """Calls user code for one episode: async functions in the loop, sync ones in its own thread.

    One thread per episode, because SQLite and others insist on the thread that opened them, and a
    call that blocks must not stop the other episodes. It starts with the first sync call.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: EnvThread | None = None

    async def call(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        if _is_async(function):
            return await function(*args, **kwargs)
        if self._thread is None:
            self._thread = EnvThread(f"env {self._name}", asyncio.Semaphore(1))
        result = await self._thread.call(partial(function, *args, **kwargs))
        return await result if inspect.isawaitable(result) else result

    def interrupt(self) -> None:
        """Interrupt a sync call that was abandoned and still runs."""
        if self._thread is not None:
            self._thread.interrupt()

    def end(self) -> None:
        if self._thread is not None:
            self._thread.end()
            self._thread = None


def _is_async(function: Function) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004  an instance may define it as async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


class ToolFunction:
    """A function with tool settings; callable as before, and bound like a method in a class."""

    def __init__(
        self,
        function: Function,
        *,
        name: str | None = None,
        description: str | None = None,
        writes: bool = False,
    ) -> None:
        self.function = function
        self.name = name or name_function(function)
        self.description = inspect.getdoc(function) if description is None else description
        self.writes = writes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> ToolFunction:
        if instance is None or not hasattr(self.function, "__get__"):
            return self
        return ToolFunction(
            self.function.__get__(instance, owner),
            name=self.name,
            description=self.description,
            writes=self.writes,
        )

    def __repr__(self) -> str:
        return f"tool({self.name})"


@overload
def tool(
    function: Function,
    *,
    name: str | None = ...,
    description: str | None = ...,
    writes: bool = ...,
) -> ToolFunction: ...
@overload
def tool(
    *, name: str | None = ..., description: str | None = ..., writes: bool = ...
) -> Callable[[Function], ToolFunction]: ...
def tool(
    function: Function | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    writes: bool = False,
) -> Any:
    """Give a function the settings of a tool: another name or description, or that it writes.

    Not needed for a plain function: its name, its signature and its docstring are the tool. The
    agent does not see the parameter `state`, nor `task` if it has no type or is a `Task`.
    `writes` records that the tool changes the state. Works as a decorator too.

    >>> import skyfleet as sf
    >>> @sf.tool(name="add_note", writes=True)
    ... def add(state, text: str) -> str:
    ...     "Add a note."
    ...     state["notes"].append(text)
    ...     return f"{len(state['notes'])} notes"
    >>> add.name, add({"notes": []}, "buy milk")
    ('add_note', '1 notes')
    """
    settings = partial(ToolFunction, name=name, description=description, writes=writes)
    return settings if function is None else settings(function)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTool:
    """A function as the agent's tool: schema, argument checks, and what it gets by name."""

    schema: Tool
    function: Function
    injected: tuple[str, ...]
    """Parameters that the environment fills in and the agent does not see."""

    @property
    def spec(self) -> ToolSpec:
        return self.schema.spec

    async def call(
        self, arguments: Mapping[str, Any], calls: EpisodeCalls, values: Mapping[str, Any]
    ) -> str:
        """Check the arguments, call the function and return the result as text."""
        checked = self.schema.read(arguments)
        injected = {name: values[name] for name in self.injected}
        return format_result(await calls.call(self.function, **checked, **injected))


def build_tool(function: Function | PythonTool) -> PythonTool:
    """Make a tool of a function, a method, a callable object or the result of `tool`."""
    if isinstance(function, PythonTool):
        return function
    settings = function if isinstance(function, ToolFunction) else ToolFunction(function)
    target = settings.function
    if not callable(target):
        raise ConfigError(
            f"tools: {target!r:.80} is not a function; pass functions or sf.tool(...)"
        )
    described = (settings.name, settings.description or "", settings.writes)
    if inspect.ismethod(target):
        # An environment's methods are bound anew in every episode; their schema is the same.
        schema, injected = _build_method_schema(target.__func__, *described)
    else:
        parameters = inspect.signature(target).parameters.values()
        schema, injected = _build_schema(target, tuple(parameters), *described)
    return PythonTool(schema=schema, function=target, injected=injected)


@lru_cache(maxsize=1024)
def _build_method_schema(
    function: Function, name: str, description: str, writes: bool
) -> tuple[Tool, tuple[str, ...]]:
    _, *parameters = inspect.signature(function).parameters.values()
    return _build_schema(function, tuple(parameters), name, description, writes)


def _build_schema(
    function: Function,
    parameters: tuple[inspect.Parameter, ...],
    name: str,
    description: str,
    writes: bool,
) -> tuple[Tool, tuple[str, ...]]:
    """The tool as the agent sees it, and the parameters that it does not see."""
    hints = _read_hints(function, name)
    visible, injected = [], []
    for p in parameters:
        if _is_injected(p.name, hints.get(p.name)):
            injected.append(p.name)
        elif p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name}: parameter {p} cannot be called by name; spell it out")
        elif p.name not in hints:
            raise ConfigError(
                f"tool {name}: parameter {p.name!r} has no type; write {p.name}: str, or whatever it is"
            )
        else:
            visible.append(p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name]))

    def described(*args: object) -> None: ...

    # `Tool.of` reads the schema off a signature and hides its first parameter.
    first = inspect.Parameter("env", inspect.Parameter.POSITIONAL_ONLY)
    described.__name__, described.__doc__ = name, description
    described.__annotations__ = {p.name: p.annotation for p in visible}
    described.__dict__["__signature__"] = inspect.Signature([first, *visible])
    return Tool.of(described, writes=writes), tuple(injected)


def _is_injected(name: str, hint: object) -> bool:
    """`task` may also be an argument of the agent's, which then has a type such as str."""
    return name == "state" or (name == "task" and hint in (None, Any, Task))


def _read_hints(function: Function, name: str) -> dict[str, Any]:
    while isinstance(function, partial):
        function = function.func
    described = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(described, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"tool {name}: {error}; import the type where the tool is defined"
        ) from None


def format_result(result: object) -> str:
    """The text that the agent reads: strings as they are, None as ok, anything else as JSON."""
    if isinstance(result, str):
        return result
    if result is None:
        return "ok"
    return json.dumps(to_jsonable_python(result, fallback=str), ensure_ascii=False)
