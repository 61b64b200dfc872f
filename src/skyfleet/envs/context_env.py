"""ContextEnv: any env with the context tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated

from pydantic import Field

from skyfleet.chat.message import Message, Text, ToolCall
from skyfleet.envs.env import Env, EnvFactory, Observation, Step
from skyfleet.envs.tools import Tool, ToolError, ToolFunction
from skyfleet.envs.turns import says_done
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Grade, Task

_MOST_HITS = 10
_SNIPPET_CHARACTERS = 200


@dataclass(slots=True)
class Past:
    """What the tools look into; turns are counted from 1."""

    page_characters: int
    said: list[tuple[str, str]] = field(default_factory=list)
    """Who said it and when, and what, at full length."""
    outputs: list[str] = field(default_factory=list)
    """The answers that are shown in pages."""
    turn: int = 0
    turns_in_view: int = 0
    """Before the one under way."""
    keep_recent_turns: int | None = None
    """Set where this turn cuts."""

    def page(self, number: int, output: int) -> str:
        """Pages put together are the output."""
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
        return f"Nothing to cut: {n_turns(past.turns_in_view)} in view."
    past.turns_in_view = past.keep_recent_turns = keep_recent_turns
    return (
        f"{n_turns(hidden)} went out of view; the task and the last {n_turns(keep_recent_turns)} "
        "stay. search_history finds what is out of view."
    )


def search_history(past: Past, pattern: Annotated[str, Field(min_length=1)]) -> str:
    """Find words in all that was said so far, in view or not; capitals do not matter."""
    # The words as they stand: a regular expression of the agent's could run for hours.
    words = re.compile(re.escape(pattern), re.IGNORECASE)
    hits = ((where, text, start) for where, text in past.said for start in _starts(words, text))
    shown = [f"{where}: {_snippet(text, start)}" for where, text, start in islice(hits, _MOST_HITS)]
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
    return past.page(page, output or len(past.outputs))


def n_turns(n: int) -> str:
    return f"{n} turn{'' if n == 1 else 's'}"


def _starts(words: re.Pattern[str], text: str) -> Iterator[int]:
    """Of the snippets that show every hit; two have nothing in common but a hit cut in the first."""
    at = end = 0
    while found := words.search(text, at):
        hit, width = found.start(), found.end() - found.start()
        start = min(hit, max(end, hit - _SNIPPET_CHARACTERS // 2))
        end = start + _SNIPPET_CHARACTERS
        at = max(found.end(), end - width + 1)
        yield start


def _snippet(text: str, start: int) -> str:
    end = start + _SNIPPET_CHARACTERS
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


_FUNCTIONS: tuple[ToolFunction, ...] = (manage_context, search_history, view_tool_output)
CONTEXT_TOOLS = {tool.spec.name: tool for tool in map(Tool.of, _FUNCTIONS)}


def with_context_tools(open_env: EnvFactory, *, max_output_chars: int) -> EnvFactory:
    """Opens the same envs with the tools; a longer answer is shown in pages of that length."""

    async def open_both(task: Task) -> ContextEnv:
        return ContextEnv(await open_env(task), page_characters=max_output_chars)

    return open_both


class ContextEnv:
    def __init__(self, env: Env, *, page_characters: int) -> None:
        self._env, self._page_characters = env, page_characters
        self._past = Past(page_characters)

    async def reset(self) -> Observation:
        self._past = Past(self._page_characters)
        opening = await self._env.reset()
        if taken := CONTEXT_TOOLS.keys() & {tool.name for tool in opening.tools}:
            raise EnvError(
                f"the env has {', '.join(sorted(taken))} of its own; "
                "set enable_context_tools=false under environment"
            )
        for message in opening.messages:
            self._note(message)
        return replace(
            opening, tools=(*opening.tools, *(tool.spec for tool in CONTEXT_TOOLS.values()))
        )

    async def step(self, action: Message) -> Step:
        past = self._past
        past.turn += 1
        theirs = tuple(call for call in action.tool_calls if call.name not in CONTEXT_TOOLS)
        passed_on = replace(action, tool_calls=theirs)
        self._note(passed_on)
        own = [self._answer(call) for call in action.tool_calls if call.name in CONTEXT_TOOLS]
        asks = theirs or action.malformed_calls or says_done(action) or not own
        step = await self._env.step(passed_on) if asks else Step()
        for message in step.messages:
            self._note(message)
        shown = iter([self._paged(message) for message in step.messages])
        messages = tuple(_in_order(action.tool_calls, iter(own), shown))
        keep, past.keep_recent_turns = past.keep_recent_turns, None
        past.turns_in_view += 1
        return replace(step, messages=messages, keep_recent_turns=keep)

    async def grade(self) -> Grade | None:
        return await self._env.grade()

    async def close(self) -> None:
        await self._env.close()

    def _answer(self, call: ToolCall) -> Message:
        tool = CONTEXT_TOOLS[call.name]
        try:
            text, is_error = str(tool.function(self._past, **tool.read(call.arguments))), False
        except ToolError as error:
            text, is_error = f"Error: {error}", True
        return Message(role="tool", content=text, tool_call_id=call.id, is_error=is_error)

    def _note(self, message: Message) -> None:
        calls = (
            f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
            for call in message.tool_calls
        )
        text = "\n".join(filter(None, (message.text, *calls, *message.malformed_calls)))
        when = f"turn {self._past.turn}" if self._past.turn else "opening"
        self._past.said.append((f"{when}, {message.role}", text))

    def _paged(self, message: Message) -> Message:
        text = message.text
        if len(text) <= self._page_characters:
            return message
        self._past.outputs.append(text)
        first = self._past.page(1, len(self._past.outputs))
        if isinstance(message.content, str):
            return replace(message, content=first)
        others = (part for part in message.content if not isinstance(part, Text))
        return replace(message, content=(Text(first), *others))


def _in_order(
    calls: Sequence[ToolCall], own: Iterator[Message], theirs: Iterator[Message]
) -> Iterator[Message]:
    """One answer a call, as they were made, then whatever else was said."""
    for call in calls:
        answer = next(own if call.name in CONTEXT_TOOLS else theirs, None)
        if answer is not None:
            yield answer
    yield from theirs
