"""Calls read back: whether the calls that a template writes are heard as they were meant.

A template of unknown format shows the tools, and the model calls them in its own way. Where nobody
here reads that way, every call would be speech and every episode a failure, in silence.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product

from skyfleet.chat.message import Message
from skyfleet.chat.probes import CALL, QUESTION, RESULT, TOOLS
from skyfleet.chat.template import RefusedConversationError, Template
from skyfleet.chat.tool_calls.formats import FORMATS
from skyfleet.chat.tool_calls.hermes import write_hermes
from skyfleet.chat.tool_calls.parser import ToolCallParser

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
