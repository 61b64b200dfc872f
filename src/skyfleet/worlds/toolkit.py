"""A world's tools: functions over its database, each call rolled back on error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from skyfleet.chat.message import ToolSpec
from skyfleet.envs.tools import Tool, ToolError, ToolFunction, shown
from skyfleet.worlds.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """What a tool works on."""

    db: Database
    current_date: str
    """ISO; the only clock there is."""
    user: str
    family: int = 0
    """Which of the disjoint families of names the data is made of."""


class Toolkit:
    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools = {tool.spec.name: tool for tool in tools}

    def add(self, function: ToolFunction, *, writes: bool) -> None:
        self._tools[function.__name__] = Tool.of(function, writes=writes)

    def plus(self, tool: Tool) -> Toolkit:
        """Another toolkit that has one tool more."""
        return Toolkit((*self._tools.values(), tool))

    @property
    def writing(self) -> frozenset[str]:
        """The names of the tools that may change something."""
        return frozenset(name for name, tool in self._tools.items() if tool.writes)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self._tools.values())

    def call(self, app: App, name: str, arguments: Mapping[str, Any]) -> object:
        """Run one tool. On ToolError the database is as it was."""
        if name not in self._tools:
            raise ToolError(f"no tool {shown(name)}; tools: {', '.join(self._tools)}")
        tool = self._tools[name]
        values = tool.read(arguments)
        with app.db.undone_on_error() if tool.writes else app.db.unwritten():
            return tool.function(app, **values)
