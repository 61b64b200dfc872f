"""Checks that run once per chat template: call format, generation mask and append-only rendering.

A template of an unknown format lists the tools, and the model calls them in its own format. If no
parser reads that format, every call would count as text and every episode would fail silently.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.template import Template, UnsupportedConversationError
from skyfleet.chat.tool_calls.formats import FORMATS
from skyfleet.chat.tool_calls.hermes import write_hermes
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.errors import ModelError, SkyfleetError

logger = logging.getLogger(__name__)

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
_TWO_CALLS = Message(role="assistant", content="Let me see.", tool_calls=(_FIRST, _SECOND))
CALL = Message(role="assistant", tool_calls=(_FIRST,))
RESULT = Message(role="tool", content="a wading bird", tool_call_id="call_0")
_OTHER_RESULT = Message(role="tool", content="un échassier", tool_call_id="call_1")

TEXT_DIALOGUE = (QUESTION, ANSWER, QUESTION)
TOOL_DIALOGUE = (QUESTION, _TWO_CALLS, RESULT, _OTHER_RESULT, ANSWER, QUESTION, CALL, RESULT)
SINGLE_CALL_DIALOGUE = (QUESTION, CALL, RESULT, ANSWER, QUESTION, CALL, RESULT)
"""For templates that allow one call per turn and no text beside it."""

Probe = tuple[Sequence[Message], Sequence[ToolSpec]]

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def with_reasoning(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(
        replace(message, reasoning="I wonder.") if message.role == "assistant" else message
        for message in messages
    )


def find_append_only_violation(renderer: Renderer, dialogue: Sequence[Message]) -> str | None:
    """Render dialogues turn by turn: text, `dialogue`, and `dialogue` with reasoning.

    None if every turn's tokens continue those of the turn before, else what differs.
    """
    probes: tuple[Probe, ...] = (
        (TEXT_DIALOGUE, ()),
        (dialogue, TOOLS),
        (with_reasoning(dialogue), TOOLS),
    )
    try:
        for messages, tools in probes:
            turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
            for start, stop in zip(turns, [*turns[1:], len(messages)], strict=True):
                completion = renderer.render_completion(messages[start])
                following = renderer.render_continuation(completion[-1], messages[start + 1 : stop])
                prompt = renderer.render_prompt(messages[:start], tools)
                if following is None or (
                    prompt + completion + following
                    != renderer.render_prompt(messages[:stop], tools)
                ):
                    roles = ", ".join(message.role for message in messages[:stop])
                    return f"the chat template renders {roles} to other tokens than turn by turn"
    except SkyfleetError as error:
        return str(error)
    return None


def adapt_call_encoding(template: Template, parse: ToolCallParser) -> Template:
    """The template with the call encoding that it accepts and whose output `parse` reads.

    Mistral's template requires ids of nine characters, DeepSeek's takes arguments as JSON text.
    """

    def score(candidate: Template) -> tuple[bool, bool, bool]:
        call = _render_after_question(candidate, CALL)
        with_result = _render_after_question(candidate, CALL, RESULT)
        return _is_parsed(call or "", parse), with_result is not None, call is not None

    candidates = [
        replace(template, nine_character_ids=nine, arguments_as_text=text)
        for nine, text in product((False, True), repeat=2)
    ]
    return max(candidates, key=score)  # the first of equals


def find_call_mismatch(
    template: Template, parse: ToolCallParser, *, is_guess: bool, is_configured: bool = False
) -> str | None:
    """Why the run would not parse the model's tool calls; None if it does or nothing contradicts it.

    Nothing contradicts `parse` if the template renders no call, unless `parse` `is_guess`; or if no
    parser reads what the template renders and the user configured `parse`: some templates leave out
    the quotes that their models write.
    """
    rendered, known = (_render_after_question(template, CALL) or "").strip(), sorted(FORMATS)
    renders_no_call = _FIRST.name not in rendered
    if _is_parsed(rendered, parse) or (renders_no_call and not is_guess):
        return None
    if renders_no_call:
        return (
            "the chat template does not show how the model writes tool calls; "
            f"set generator.tool_call_parser to one of {known}"
        )
    parsers = [name for name in known if _could_parse(template, FORMATS[name].parse)]
    reason = f"the chat template renders a tool call as {rendered!r}, which would not be parsed"
    if parsers:
        return f"{reason}; set generator.tool_call_parser={parsers[0]}"
    if is_configured:
        logger.warning("using the configured generator.tool_call_parser, although %s", reason)
        return None
    return (
        f"{reason}; give generator.chat_template a template that renders calls as one of {known}, "
        "or set generator.tool_call_parser to the format that the model writes"
    )


def parses_hermes(parse: ToolCallParser) -> bool:
    return _is_parsed("".join(write_hermes(CALL.tool_calls)), parse)


def find_generation_mask_mismatch(template: Template, renderer: Renderer) -> str | None:
    """None if `{% generation %}` encloses exactly the tokens of a turn, or is not used.

    Other trainers tokenize the conversation again and train on the tokens in these blocks. This one
    trains on the sampled tokens, so the blocks have no effect; they are compared once.
    """
    if not _GENERATION_BLOCK.search(template.text):
        return None
    try:
        token_ids, mask = template.generation_mask([QUESTION, ANSWER])
        sampled = renderer.render_completion(ANSWER)
    except ModelError as error:
        return f"the chat template's generation blocks cannot be compared with a turn: {error}"
    masked = [token for token, is_in_block in zip(token_ids, mask, strict=True) if is_in_block]
    if masked == sampled:
        return None
    return (
        f"the chat template's generation block encloses {renderer.text(masked)!r}; "
        f"the run trains on the sampled tokens, {renderer.text(sampled)!r}"
    )


def _could_parse(template: Template, parse: ToolCallParser) -> bool:
    """With the call encoding adapted to that parser."""
    adapted = adapt_call_encoding(template, parse)
    return _is_parsed(_render_after_question(adapted, CALL) or "", parse)


def _is_parsed(rendered: str, parse: ToolCallParser) -> bool:
    calls = parse(rendered, TOOLS).tool_calls
    return [(call.name, call.arguments) for call in calls] == [(_FIRST.name, _FIRST.arguments)]


def _render_after_question(template: Template, *messages: Message) -> str | None:
    """The text that the template renders for `messages`; None if it rejects them."""
    try:
        whole = template.render([QUESTION, *messages], TOOLS, prompt=False)
    except UnsupportedConversationError:
        return None
    return whole.rpartition(QUESTION.text)[2]
