"""Threads: conversations as their exact tokens, found again by what a client sends back.

A client of the chat endpoint sends the whole conversation every time. Where it holds a message of
ours, unchanged, the tokens go on from those that were sampled, and are not rendered anew. Two
attempts at a task may say the same after other thoughts: a client that names its sessions is told
from others by that name; of those that do not, whose words came from different tokens go on from neither.
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
from skyfleet.engines.openai_messages import aloud

MAX_TOKENS_KEPT = 16_000_000
"""Remembered in all: 64 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    token_ids: list[int]
    session: str | None
    """Which has the beginning in its cache."""


class TokenCache:
    def __init__(self, renderer: Renderer, *, max_tokens_kept: int = MAX_TOKENS_KEPT) -> None:
        self._renderer, self._left = renderer, max_tokens_kept
        self._entries: OrderedDict[bytes, tuple[str, array[int]]] = OrderedDict()
        """Without tokens: several were the same words'."""

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, client: str | None
    ) -> Prompt:
        """`client` is the name that it gave its session."""
        spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if spoken:
            heard = spoken[-1] + 1
            key = _key(messages[:heard], tools, client)
            session, token_ids = self._entries.get(key, ("", array("i")))
            if token_ids:
                self._entries.move_to_end(key)
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
        client: str | None,
    ) -> None:
        """`messages` end in what the client was answered, `token_ids` in what was sampled."""
        key, tokens = _key(messages, tools, client), array("i", token_ids)
        if key in self._entries:
            before = self._entries.pop(key)[1]
            self._left += len(before)
            if client is None and before != tokens:
                tokens = array("i")
        self._entries[key] = session, tokens
        self._left -= len(tokens)
        while self._left < 0:
            _, (_, oldest) = self._entries.popitem(last=False)
            self._left += len(oldest)


def comparable_fields(message: Message) -> list[object]:
    """What a client gives back of a message, whatever it does to the rest."""
    calls = [[call.name, dict(call.arguments)] for call in message.tool_calls]
    return [message.role, aloud(message), calls]


def _key(messages: Sequence[Message], tools: Sequence[ToolSpec], client: str | None) -> bytes:
    """Ids and thoughts are left out: clients change the one and drop the other."""
    said = [comparable_fields(message) for message in messages]
    shown = [[tool.name, tool.description, dict(tool.parameters)] for tool in tools]
    written = json.dumps([client, said, shown], sort_keys=True)
    return blake2b(written.encode(), digest_size=16).digest()
