"""ContextEnv: a wrapper that gives any environment tools to shorten and search the history.

The docstrings of the three tool functions are the tool descriptions that the agent reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated

from pydantic import Field

from skyfleet.chat.message import Message, Text, ToolCall
from skyfleet.envs.env import Env, EnvFactory, Observation, Step, close_env, grade_env
from skyfleet.envs.tool_turns import says_done
from skyfleet.envs.tools import Tool, ToolError, ToolFunction
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Grade, Task

_MAX_HITS = 10
_SNIPPET_CHARACTERS = 200


@dataclass(slots=True)
class Past:
    """The history that the tools read; turns are counted from 1."""

    page_characters: int
    messages: list[tuple[str, str]] = field(default_factory=list)
    """Turn and role of every message, and its full text."""
    outputs: list[str] = field(default_factory=list)
    """The answers that are shown in pages."""
    turn: int = 0
    turns_in_view: int = 0
    """Without the current one."""
    keep_recent_turns: int | None = None
    """Set if this turn cuts the history."""

    def format_page(self, number: int, output: int) -> str:
        """Return a page; concatenated, all pages are the output."""
        text, width = self.outputs[output - 1], self.page_characters
        pages = -(-len(text) // width)
        if number > pages:
            raise ToolError(f"page is {number}; output {output} has {pages} pages")
        more = f"; view_tool_output(output={output}, page={number + 1}) reads on"
        return (
            f"{text[(number - 1) * width : number * width]}\n"
            f"[page {number} of {pages} of output {output}{more if number < pages else ''}]"
        )


def manage_context(past: Past, keep_recent_turns: Annotated[int, Field(ge=0)] = 5) -> str:
    """Make room: only the task and the last turns, 5 unless told otherwise, stay in view."""
    hidden = past.turns_in_view - keep_recent_turns
    if hidden <= 0:
        return f"Nothing to cut: {format_turns(past.turns_in_view)} in view."
    past.turns_in_view = past.keep_recent_turns = keep_recent_turns
    return (
        f"{format_turns(hidden)} went out of view; the task and the last {format_turns(keep_recent_turns)} "
        "stay. search_history finds what is out of view."
    )


def search_history(past: Past, pattern: Annotated[str, Field(min_length=1)]) -> str:
    """Find words in all that was said so far, in view or not; capitals do not matter."""
    # Literal text: a regular expression from the agent could run for hours.
    literal = re.compile(re.escape(pattern), re.IGNORECASE)
    hits = (
        (where, text, start)
        for where, text in past.messages
        for start in _find_snippets(literal, text)
    )
    shown = [
        f"{where}: {_format_snippet(text, start)}" for where, text, start in islice(hits, _MAX_HITS)
    ]
    if more := sum(1 for _ in hits):
        shown.append(f"[{more} more; search for longer words]")
    return "\n".join(shown) or f"Nobody said {pattern!r}."


def view_tool_output(
    past: Past,
    page: Annotated[int, Field(ge=1)] = 1,
    output: Annotated[int, Field(ge=1)] | None = None,
) -> str:
    """Read a page of a long answer; output is the answer's number, by default the latest."""
    if not past.outputs:
        raise ToolError("every answer so far was shown whole")
    if output is not None and output > len(past.outputs):
        raise ToolError(f"output is {output}; {len(past.outputs)} answers have pages")
    return past.format_page(page, output or len(past.outputs))


def format_turns(n: int) -> str:
    return f"{n} turn{'' if n == 1 else 's'}"


def _find_snippets(literal: re.Pattern[str], text: str) -> Iterator[int]:
    """Yield where snippets start that together show every hit.

    Two snippets overlap only if the first one cuts a hit.
    """
    at = end = 0
    while found := literal.search(text, at):
        hit, width = found.start(), found.end() - found.start()
        start = min(hit, max(end, hit - _SNIPPET_CHARACTERS // 2))
        end = start + _SNIPPET_CHARACTERS
        at = max(found.end(), end - width + 1)
        yield start


def _format_snippet(text: str, start: int) -> str:
    end = start + _SNIPPET_CHARACTERS
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


_FUNCTIONS: tuple[ToolFunction, ...] = (manage_context, search_history, view_tool_output)
CONTEXT_TOOLS = {tool.spec.name: tool for tool in map(Tool.of, _FUNCTIONS)}


def with_context_tools(open_env: EnvFactory, *, max_output_chars: int) -> EnvFactory:
    """Wrap every environment in a ContextEnv; longer answers are shown in pages of that length."""

    async def open_wrapped(task: Task) -> ContextEnv:
        return ContextEnv(await open_env(task), page_characters=max_output_chars)

    return open_wrapped


class ContextEnv:
    def __init__(self, env: Env, *, page_characters: int) -> None:
        self._env, self._page_characters = env, page_characters
        self._past = Past(page_characters)
        self._steps: list[Step] = []

    async def reset(self) -> Observation:
        self._past, self._steps = Past(self._page_characters), []
        observation = await self._env.reset()
        if taken := CONTEXT_TOOLS.keys() & {tool.name for tool in observation.tools}:
            raise EnvError(
                f"the env has its own tools named {', '.join(sorted(taken))}; "
                "set environment.enable_context_tools=false"
            )
        for message in observation.messages:
            self._record(message)
        return replace(
            observation, tools=(*observation.tools, *(tool.spec for tool in CONTEXT_TOOLS.values()))
        )

    async def step(self, action: Message) -> Step:
        past = self._past
        past.turn += 1
        inner_calls = tuple(call for call in action.tool_calls if call.name not in CONTEXT_TOOLS)
        inner_action = replace(action, tool_calls=inner_calls)
        self._record(inner_action)
        own = [self._answer(call) for call in action.tool_calls if call.name in CONTEXT_TOOLS]
        steps_inner = inner_calls or action.malformed_calls or says_done(action) or not own
        step = await self._env.step(inner_action) if steps_inner else Step()
        self._steps.append(step)
        for message in step.messages:
            self._record(message)
        shown = iter([self._paginate(message) for message in step.messages])
        messages = tuple(_merge_in_order(action.tool_calls, iter(own), shown))
        keep, past.keep_recent_turns = past.keep_recent_turns, None
        past.turns_in_view += 1
        return replace(step, messages=messages, keep_recent_turns=keep)

    async def grade(self) -> Grade | None:
        return await grade_env(self._env, self._steps)

    async def close(self) -> None:
        await close_env(self._env)

    def _answer(self, call: ToolCall) -> Message:
        tool = CONTEXT_TOOLS[call.name]
        try:
            text, is_error = str(tool.function(self._past, **tool.read(call.arguments))), False
        except ToolError as error:
            text, is_error = f"Error: {error}", True
        return Message(role="tool", content=text, tool_call_id=call.id, is_error=is_error)

    def _record(self, message: Message) -> None:
        calls = (
            f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
            for call in message.tool_calls
        )
        text = "\n".join(filter(None, (message.text, *calls, *message.malformed_calls)))
        when = f"turn {self._past.turn}" if self._past.turn else "opening"
        self._past.messages.append((f"{when}, {message.role}", text))

    def _paginate(self, message: Message) -> Message:
        text = message.text
        if len(text) <= self._page_characters:
            return message
        self._past.outputs.append(text)
        first = self._past.format_page(1, len(self._past.outputs))
        if isinstance(message.content, str):
            return replace(message, content=first)
        others = (part for part in message.content if not isinstance(part, Text))
        return replace(message, content=(Text(first), *others))


def _merge_in_order(
    calls: Sequence[ToolCall], own: Iterator[Message], inner: Iterator[Message]
) -> Iterator[Message]:
    """Yield one answer per call in the order of the calls, then all other messages."""
    for call in calls:
        answer = next(own if call.name in CONTEXT_TOOLS else inner, None)
        if answer is not None:
            yield answer
    yield from inner
