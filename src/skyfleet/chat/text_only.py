"""Text only: a message for a model that cannot see."""

from __future__ import annotations

from skyfleet.chat.message import Image, Message
from skyfleet.chat.pieces import END_THINK, THINK
from skyfleet.errors import ModelError


def text_only(message: Message) -> str:
    """The message's text. A picture is refused: a silent drop would leave the model guessing."""
    if isinstance(message.content, str):
        return message.content
    if any(isinstance(part, Image) for part in message.content):
        raise ModelError(
            f"a {message.role} message holds an image, and this renderer writes text only; "
            "take a tool_use task or an env that describes what it shows"
        )
    return message.text


def thought_aloud(message: Message) -> str:
    """The message's text after its thought, for formats that have no place for one."""
    text = text_only(message)
    if message.reasoning is None:
        return text
    return f"{THINK}\n{message.reasoning}\n{END_THINK}\n\n{text}"
