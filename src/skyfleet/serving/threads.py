"""Threads: conversations as their exact tokens, found again by what a client sends back.

A client of the chat endpoint sends the whole conversation every time. Where it holds a message of
ours, unchanged, the tokens go on from those that were sampled, and are not rendered anew.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.renderer import Renderer

MOST_TOKENS = 16_000_000
"""Remembered in all: 64 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    token_ids: list[int]
    session: str | None
    """Which has the beginning in its cache."""


class Threads:
    def __init__(self, renderer: Renderer, *, most_tokens: int = MOST_TOKENS) -> None:
        self._renderer, self._left = renderer, most_tokens
        self._kept: OrderedDict[bytes, tuple[str, array[int]]] = OrderedDict()

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
        spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if spoken:
            heard = spoken[-1] + 1
            key = _key(messages[:heard], tools)
            if key in self._kept:
                self._kept.move_to_end(key)
                session, token_ids = self._kept[key]
                joined = self._renderer.join(token_ids[-1], messages[heard:])
                if joined is not None:
                    return Prompt(token_ids=[*token_ids, *joined], session=session)
        return Prompt(token_ids=self._renderer.open(messages, tools), session=None)

    def keep(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        token_ids: Sequence[int],
        *,
        session: str,
    ) -> None:
        """`messages` end in what the client was answered, `token_ids` in what was sampled."""
        key = _key(messages, tools)
        if key in self._kept:
            self._left += len(self._kept.pop(key)[1])
        self._kept[key] = session, array("i", token_ids)
        self._left -= len(token_ids)
        while self._left < 0:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._left += len(oldest)


def _key(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> bytes:
    """Ids and thoughts are left out: clients change the one and drop the other."""
    said = [
        [m.role, m.text, [[call.name, dict(call.arguments)] for call in m.tool_calls]]
        for m in messages
    ]
    shown = [[tool.name, tool.description, dict(tool.parameters)] for tool in tools]
    written = json.dumps([said, shown], sort_keys=True)
    return blake2b(written.encode(), digest_size=16).digest()
