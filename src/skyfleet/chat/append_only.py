"""Append only: whether a renderer's turns, joined, are the tokens of the whole conversation."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.chat.message import Message
from skyfleet.chat.probes import TALK, TOOLS, thoughtful
from skyfleet.chat.renderer import Renderer
from skyfleet.errors import SkyfleetError


def why_not_append_only(renderer: Renderer, work: Sequence[Message]) -> str | None:
    """Play `work` turn by turn, in words, with tools and with thoughts; None: all of it joins."""
    try:
        for messages, tools in ((TALK, ()), (work, TOOLS), (thoughtful(work), TOOLS)):
            spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
            for start, stop in zip(spoken, [*spoken[1:], len(messages)], strict=True):
                said = renderer.write(messages[start])
                glue = renderer.join(said[-1], messages[start + 1 : stop])
                before = renderer.open(messages[:start], tools)
                if glue is None or before + said + glue != renderer.open(messages[:stop], tools):
                    heard = ", ".join(message.role for message in messages[:stop])
                    return f"the chat template gives {heard} other tokens than turn by turn"
    except SkyfleetError as error:
        return str(error)
    return None
