"""Tools of a world: functions over its database, rolled back on error, with results formatted as short text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from skyfleet.chat.message import ToolSpec
from skyfleet.envs.tools import Tool, ToolError, ToolFunction, shown
from skyfleet.worlds.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """The state that a tool reads and writes: database, date and user."""

    db: Database
    current_date: str
    """ISO date. Tools read no other clock."""
    user: str
    family: int = 0
    """Index of the disjoint name family that the data uses, see `vocabulary.Names`."""


class Toolkit:
    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools = {tool.spec.name: tool for tool in tools}

    def add(self, function: ToolFunction, *, writes: bool) -> None:
        self._tools[function.__name__] = Tool.of(function, writes=writes)

    def with_tool(self, tool: Tool) -> Toolkit:
        """Return a copy with one more tool."""
        return Toolkit((*self._tools.values(), tool))

    @property
    def writing(self) -> frozenset[str]:
        """Names of the tools that may change the database."""
        return frozenset(name for name, tool in self._tools.items() if tool.writes)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self._tools.values())

    def call(self, app: App, name: str, arguments: Mapping[str, Any]) -> object:
        """Run one tool. A ToolError leaves the database unchanged."""
        if name not in self._tools:
            raise ToolError(f"no tool {shown(name)}; tools: {', '.join(self._tools)}")
        tool = self._tools[name]
        values = tool.read(arguments)
        with app.db.rollback_on_error() if tool.writes else app.db.forbid_writes():
            return tool.function(app, **values)


MAX_ROWS = 5
"""A longer listing is cut here and ends with the number of omitted rows."""


def show(result: object) -> str:
    """Format rows as CSV with a header, one row as `key: value` lines, anything else as `str`.

    `show([{"id": 3, "name": "amy"}])` is "id,name" and "3,amy" on two lines.
    """
    if result is None:
        return "ok"
    if result == "":
        return '""'
    if isinstance(result, dict):
        return "\n".join(f"{key}: {_cell(value)}" for key, value in result.items())
    if isinstance(result, list) and result:
        lines = [",".join(result[0])]
        lines += [",".join(map(_cell, row.values())) for row in result[:MAX_ROWS]]
        if len(result) > MAX_ROWS:
            lines.append(f"{len(result) - MAX_ROWS} more")
        return "\n".join(lines)
    return str(result)


def _cell(value: object) -> str:
    return "none" if value is None else " ".join(str(value).split())
