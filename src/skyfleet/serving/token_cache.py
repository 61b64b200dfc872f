"""TokenCache: the exact tokens of conversations, looked up by the messages that a client sends back.

A client of the chat endpoint sends the whole conversation with every request. If it contains an
unchanged message of ours, the prompt continues from the sampled tokens instead of rendering them
again. Two attempts at a task may produce the same text from different tokens. The session name
separates clients that send one; without it, a conversation with several token sequences is rendered
again.
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
from skyfleet.engines.openai_messages import visible_text

MAX_CACHED_TOKENS = 16_000_000
"""Over all conversations: 64 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrompt:
    token_ids: list[int]
    session: str | None
    """The engine session that has the prefix in its KV cache."""


class TokenCache:
    def __init__(self, renderer: Renderer, *, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._renderer, self._tokens_left = renderer, max_tokens
        self._entries: OrderedDict[bytes, tuple[str, array[int]]] = OrderedDict()
        """Session and tokens; no tokens if several sequences produced the same text."""

    def build_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, client: str | None
    ) -> CachedPrompt:
        """`client` is the session name that the client sent."""
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if turns:
            n_cached = turns[-1] + 1
            key = _build_key(messages[:n_cached], tools, client)
            session, token_ids = self._entries.get(key, ("", array("i")))
            if token_ids:
                self._entries.move_to_end(key)
                following = self._renderer.render_continuation(token_ids[-1], messages[n_cached:])
                if following is not None:
                    return CachedPrompt(token_ids=[*token_ids, *following], session=session)
        return CachedPrompt(token_ids=self._renderer.render_prompt(messages, tools), session=None)

    def store(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        token_ids: Sequence[int],
        *,
        session: str,
        client: str | None,
    ) -> None:
        """`messages` end with the response to the client, `token_ids` with the sampled tokens."""
        key, tokens = _build_key(messages, tools, client), array("i", token_ids)
        if key in self._entries:
            previous = self._entries.pop(key)[1]
            self._tokens_left += len(previous)
            if client is None and previous != tokens:
                tokens = array("i")
        self._entries[key] = session, tokens
        self._tokens_left -= len(tokens)
        while self._tokens_left < 0:
            _, (_, oldest) = self._entries.popitem(last=False)
            self._tokens_left += len(oldest)


def comparable_fields(message: Message) -> list[object]:
    """The parts of a message that clients send back unchanged; they alter ids and drop reasoning."""
    calls = [[call.name, dict(call.arguments)] for call in message.tool_calls]
    return [message.role, visible_text(message), calls]


def _build_key(messages: Sequence[Message], tools: Sequence[ToolSpec], client: str | None) -> bytes:
    conversation = [comparable_fields(message) for message in messages]
    schemas = [[tool.name, tool.description, dict(tool.parameters)] for tool in tools]
    dumped = json.dumps([client, conversation, schemas], sort_keys=True)
    return blake2b(dumped.encode(), digest_size=16).digest()
