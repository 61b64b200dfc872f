"""Prompt: what an agent is told about a Fleet task, apart from the wish and the tools."""

from __future__ import annotations

from datetime import date
from typing import Any

from skyfleet.chat.message import Message
from skyfleet.envs.env import DONE
from skyfleet.tasks.task import Task

_NAMED = {"LOGGED_IN_USER": "Your user id", "LOGGED_IN_NAME": "Your name"}
_HINTS = {
    "fostgres": "Look up tables and columns in information_schema before you query them.",
}
_SCREEN = f"""\
The screen:
- Do one thing, look at the screenshot, then choose the next.
- After a page change, wait once.
- What failed twice will fail again: try another way.
- Say {DONE} when the task is finished."""

_MANNERS = f"""\
If a tool answers with an error, read it and do not repeat the same call: change the arguments, \
use another tool, or take smaller steps.

End every turn with either a tool call or {DONE}. State your answer, where one is asked for, \
before {DONE}. Nobody answers questions, so do not ask any or offer more help."""


def opening_messages(task: Task, *, today: date) -> tuple[Message, Message]:
    """`today` counts only where the task has no CURRENT_DATE: the env's clock is the right one."""
    variables = dict(task.env_variables)
    current_date = str(variables.pop("CURRENT_DATE", None) or today.isoformat())
    sections = [
        "You work in a software environment through tools. Do the task by calling them.",
        f"Today is {current_date}. A date without a year is in this year or a coming one.",
        _context(variables),
        _HINTS.get(task.env_key, ""),
        _SCREEN if task.modality != "tool_use" else "",
        _MANNERS,
    ]
    system = "\n\n".join(section for section in sections if section)
    return Message(role="system", content=system), Message(role="user", content=task.prompt)


def _context(variables: dict[str, Any]) -> str:
    known = [f"- {name}: {variables.pop(key)}" for key, name in _NAMED.items() if key in variables]
    others = [f"- {key}: {value}" for key, value in variables.items()]
    return "\n".join(["The environment:", *known, *others]) if known or others else ""
