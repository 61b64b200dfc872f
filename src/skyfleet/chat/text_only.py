"""The text of a message, for models without vision."""

from __future__ import annotations

from skyfleet.chat.message import Image, Message
from skyfleet.chat.pieces import END_THINK, THINK
from skyfleet.errors import ModelError


def text_only(message: Message) -> str:
    """The message's text. Raises ModelError for an image, which must not be dropped silently."""
    if isinstance(message.content, str):
        return message.content
    if any(isinstance(part, Image) for part in message.content):
        raise ModelError(
            f"a {message.role} message contains an image, but this renderer supports text only; "
            "use a tool_use task or an environment that describes what it shows"
        )
    return message.text


def inline_reasoning(message: Message) -> str:
    """The message's text after its reasoning, for formats without a reasoning field."""
    text = text_only(message)
    if message.reasoning is None:
        return text
    return f"{THINK}\n{message.reasoning}\n{END_THINK}\n\n{text}"
