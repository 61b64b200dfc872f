"""Context tools: for an agent whose episode outgrows its context.

`manage_context` takes old turns out of view and never the task; `search_history` finds what they
held; an answer that is too long is shown in pages, and `view_tool_output` turns them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

from pydantic import Field

from skyfleet.envs.worlds.toolkit import Tool, ToolError, ToolFunction

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
