"""Checks that run once per chat template: call format, generation mask and append-only rendering."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.template import RefusedConversationError, Template
from skyfleet.chat.tool_calls.formats import FORMATS
from skyfleet.chat.tool_calls.hermes import write_hermes
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.errors import ModelError

SYSTEM = Message(role="system", content="You know birds.")
QUESTION = Message(role="user", content="What is a heron?")
ANSWER = Message(role="assistant", content="A long-legged bird.")

TOOLS = (
    ToolSpec(
        name="look_up",
        description="Looks a word up.",
        parameters={
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    ),
)
_FIRST = ToolCall(id="call_0", name="look_up", arguments={"word": "heron"})
_SECOND = ToolCall(id="call_1", name="look_up", arguments={"word": "héron"})
_ASK_BOTH = Message(role="assistant", content="Let me see.", tool_calls=(_FIRST, _SECOND))
CALL = Message(role="assistant", tool_calls=(_FIRST,))
RESULT = Message(role="tool", content="a wading bird", tool_call_id="call_0")
_OTHER_RESULT = Message(role="tool", content="un échassier", tool_call_id="call_1")

TALK = (QUESTION, ANSWER, QUESTION)
WORK = (QUESTION, _ASK_BOTH, RESULT, _OTHER_RESULT, ANSWER, QUESTION, CALL, RESULT)
CALL_BY_CALL = (QUESTION, CALL, RESULT, ANSWER, QUESTION, CALL, RESULT)
"""For templates that take one call a turn, and no word beside it."""

Probe = tuple[Sequence[Message], Sequence[ToolSpec]]


def thoughtful(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(
        replace(message, reasoning="I wonder.") if message.role == "assistant" else message
        for message in messages
    )


logger = logging.getLogger(__name__)

(_PROBE,) = CALL.tool_calls


def handed_as_taken(template: Template, parse: ToolCallParser) -> Template:
    """The template, to be handed calls in the way in which it takes them and writes what is read.

    Mistral's wants ids of nine characters, DeepSeek's the arguments as JSON text.
    """

    def merits(way: Template) -> tuple[bool, bool, bool]:
        written = _written(way, CALL)
        answered = _written(way, CALL, RESULT)
        return _is_read(written or "", parse), answered is not None, written is not None

    ways = [
        replace(template, nine_character_ids=nine, arguments_as_text=text)
        for nine, text in product((False, True), repeat=2)
    ]
    return max(ways, key=merits)  # of equals the first


def why_unread(
    template: Template, parse: ToolCallParser, *, is_guess: bool, is_named: bool = False
) -> str | None:
    """Why a call of the model would not be heard; None: it is, or `parse` is believed.

    It is where the template writes no call, unless it `is_guess`; and where nobody reads what the
    template writes and `parse` `is_named`: some leave out the quotes that their models write.
    """
    written, known = (_written(template, CALL) or "").strip(), sorted(FORMATS)
    writes_none = _PROBE.name not in written
    if _is_read(written, parse) or (writes_none and not is_guess):
        return None
    if writes_none:
        return (
            "the chat template does not say how the model writes its calls; "
            f"set generator.tool_call_parser to one of {known}"
        )
    readers = [name for name in known if _could_read(template, FORMATS[name].parse)]
    why = f"the chat template writes a call as {written!r}, which would not be read"
    if readers:
        return f"{why}; set generator.tool_call_parser={readers[0]}"
    if is_named:
        logger.warning("generator.tool_call_parser is believed, though %s", why)
        return None
    return (
        f"{why}; give generator.chat_template one that writes calls as one of {known}, or name in "
        "generator.tool_call_parser what the model writes, whatever its template does"
    )


def reads_hermes(parse: ToolCallParser) -> bool:
    return _is_read("".join(write_hermes(CALL.tool_calls)), parse)


def _could_read(template: Template, parse: ToolCallParser) -> bool:
    """Handed calls as they are written for that reader."""
    return _is_read(_written(handed_as_taken(template, parse), CALL) or "", parse)


def _is_read(written: str, parse: ToolCallParser) -> bool:
    heard = parse(written, TOOLS).tool_calls
    return [(call.name, call.arguments) for call in heard] == [(_PROBE.name, _PROBE.arguments)]


def _written(template: Template, *messages: Message) -> str | None:
    """What stands behind the question that `messages` follow; None: the template refuses them."""
    try:
        whole = template.render([QUESTION, *messages], TOOLS, prompt=False)
    except RefusedConversationError:
        return None
    return whole.rpartition(QUESTION.text)[2]


_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def why_marks_differ(template: Template, renderer: Renderer) -> str | None:
    """None where the template marks exactly the tokens of a turn, or marks nothing."""
    if not _MARK.search(template.text):
        return None
    try:
        token_ids, marks = template.marked([QUESTION, ANSWER])
        sampled = renderer.write(ANSWER)
    except ModelError as error:
        return f"the chat template's marks cannot be compared with what is sampled: {error}"
    marked = [token for token, mark in zip(token_ids, marks, strict=True) if mark]
    if marked == sampled:
        return None
    return (
        f"the chat template marks {renderer.text(marked)!r} as the model's own; "
        f"trained on is what is sampled, {renderer.text(sampled)!r}"
    )
