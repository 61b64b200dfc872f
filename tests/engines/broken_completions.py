"""Broken servers whose HTTP is fine and whose completions are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tests.engines.broken_servers import INVALID, WITH_TOKENS, add, changing, setting

COMPLETION = partial(add, sentence=INVALID)
COMPLETION("no choices", setting("choices", to=[]), clients=("tokens", "chat", "messages"))
COMPLETION("choices null", setting("choices", to=None), clients=("tokens", "chat", "messages"))
COMPLETION(
    "choices as an object", setting("choices", to={"0": {}}), clients=("tokens", "chat", "messages")
)
COMPLETION(
    "a choice that is text", setting("choices", to=["done"]), clients=("tokens", "chat", "messages")
)
BAD_TOKENS: Mapping[str, Callable[[list[int]], object]] = {
    "token ids as strings": lambda ids: [str(i) for i in ids],
    "token ids as token_id strings": lambda ids: [f"token_id:{i}" for i in ids],
    "token ids as floats": lambda ids: [i + 0.5 for i in ids],
    "token ids as booleans": lambda ids: [True for _ in ids],
    "negative token ids": lambda ids: [-i - 1 for i in ids],
    "token ids beyond any vocabulary": lambda ids: [2**70 for _ in ids],
    "token ids with null": lambda ids: [*ids[:-1], None],
    "token ids as one string": lambda ids: "1,2,3",
    "token ids as an object": lambda ids: {"ids": ids},
    "more tokens than max_tokens": lambda ids: ids * 1000,
    "more token ids than logprobs": lambda ids: ids * 2,
    "fewer token ids than logprobs": lambda ids: ids[:-1],
}
for name, to in BAD_TOKENS.items():
    COMPLETION(name, setting("choices", 0, "token_ids", to=to), clients=WITH_TOKENS)
COMPLETION(
    "no token at all",
    setting("choices", 0, to={"token_ids": [], "logprobs": {}}),
    clients=("tokens",),
)
BAD_LOGPROBS: Mapping[str, Callable[[list[float]], object]] = {
    "NaN logprobs": lambda logprobs: [float("nan")] * len(logprobs),
    "infinite logprobs": lambda logprobs: [float("-inf")] * len(logprobs),
    "logprobs above 0": lambda logprobs: [3.5] * len(logprobs),
    "logprobs as strings": lambda logprobs: [str(p) for p in logprobs],
    "logprobs as booleans": lambda logprobs: [False] * len(logprobs),
    "one logprob null": lambda logprobs: [None, *logprobs[1:]],
    "fewer logprobs than tokens": lambda logprobs: logprobs[1:],
    "logprobs as a number": lambda logprobs: -1.5,
}
for name, to_logprobs in BAD_LOGPROBS.items():
    write_kv = ("choices", 0, "logprobs", "token_logprobs")
    COMPLETION(name, setting(*write_kv, to=to_logprobs), clients=("tokens",))
COMPLETION("no logprobs", setting("choices", 0, "logprobs", to=None), clients=WITH_TOKENS)
COMPLETION("logprobs as text", setting("choices", 0, "logprobs", to="-0.5"), clients=WITH_TOKENS)
COMPLETION(
    "chat logprobs without numbers",
    setting("choices", 0, "logprobs", "content", to=[1, 2]),
    clients=("chat",),
)
COMPLETION(
    "a numeric finish reason", setting("choices", 0, "finish_reason", to=7), clients=WITH_TOKENS
)
COMPLETION(
    "a finish reason error",
    setting("choices", 0, "finish_reason", to="error"),
    clients=("tokens", "chat", "messages"),
)
COMPLETION("another model", setting("model", to="gpt-2"), clients=WITH_TOKENS)
COMPLETION(
    "the answer to another prompt",
    setting("choices", 0, "prompt_token_ids", to=[1, 2, 3]),
    clients=("tokens",),
)
add(
    "aborts without a token",
    changing(
        lambda answer: answer["choices"][0].update(
            finish_reason="abort", token_ids=[], logprobs={"token_logprobs": []}
        )
    ),
    clients=("tokens",),
    sentence="aborted the turn",
)
add(
    "aborts inside a message",
    setting("choices", 0, "finish_reason", to="abort"),
    clients=("messages", "chat"),
    sentence="aborted the turn",
)
COMPLETION("a policy version as text", setting("policy_version", to="newest"), clients=WITH_TOKENS)
COMPLETION(
    "prompt token ids as strings", setting("prompt_token_ids", to=["1", "2"]), clients=("chat",)
)
COMPLETION(
    "a message that is null",
    setting("choices", 0, "message", to=None),
    clients=("chat", "messages"),
)
COMPLETION(
    "a message that is a list",
    setting("choices", 0, "message", to=["done"]),
    clients=("chat", "messages"),
)
COMPLETION(
    "a message without any field",
    setting("choices", 0, "message", to={}),
    clients=("chat", "messages"),
)
COMPLETION(
    "content that is a number",
    setting("choices", 0, "message", "content", to=7),
    clients=("chat", "messages"),
)
COMPLETION(
    "tool calls that are a number",
    setting("choices", 0, "message", "tool_calls", to=7),
    clients=("chat", "messages"),
)
COMPLETION(
    "malformed calls that are a number",
    setting("choices", 0, "message", "malformed_calls", to=7),
    clients=("chat", "messages"),
)
COMPLETION("content blocks that are numbers", setting("content", to=[1, 2]), clients=("anthropic",))
COMPLETION(
    "a tool use without a name",
    setting("content", to=[{"type": "tool_use"}]),
    clients=("anthropic",),
)
COMPLETION("content that is null", setting("content", to=None), clients=("anthropic",))
add(
    "no token ids",
    changing(lambda answer: answer["choices"][0].pop("token_ids") and None),
    clients=WITH_TOKENS,
    ends="stops",
    sentence="returned no token ids.*can only be evaluated",
)
