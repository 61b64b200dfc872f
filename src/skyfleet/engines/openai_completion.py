"""Validate and parse the completions of an OpenAI-compatible server.

Every function raises ValueError with what is wrong; `invalid_completion` turns that into an error
with the server and the remedy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from types import TracebackType
from typing import Any

from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines.response_body import show_text
from skyfleet.errors import EngineError

MAX_VOCAB_SIZE = 2**31
"""If the vocabulary is not known."""
MAX_LOGPROB = 0.01
"""A probability above 1, with room for rounding."""
_FINISH_REASONS: Mapping[str, Finish] = {"length": "length", "abort": "abort"}
_FAILED_REASONS = frozenset({"error", "failed", "cancelled"})


class InvalidCompletionError(EngineError):
    """The server answered, but not with a completion."""


class invalid_completion:  # noqa: N801 - used like a function
    """Turn what parsing an odd answer may raise into an InvalidCompletionError with `url`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, EngineError):
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            raise InvalidCompletionError(
                f"{self._url} returned an invalid completion: {show_text(reason)}; check that it is "
                "an OpenAI-compatible server of this model, and read its log"
            ) from error


def parse_choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first choice. An error that comes with status 200 is part of the message."""
    match answer:
        case {"choices": [dict() as choice, *_]}:
            check_finish_reason(choice)
            return choice
        case {"choices": []}:
            raise ValueError("choices=[]; a completion has at least one")
        case {"error": error} if error:
            raise ValueError(f"error: {error}")
    raise ValueError(f"choices={answer.get('choices')!r}, not a list of objects")


def check_finish_reason(choice: Mapping[str, Any]) -> None:
    reason = choice.get("finish_reason")
    if reason is not None and not isinstance(reason, str):
        raise ValueError(f"finish_reason={reason!r}, not a string")
    if reason in _FAILED_REASONS:
        raise ValueError(f"finish_reason={reason!r}, so the server failed to generate it")


def parse_finish(choice: Mapping[str, Any]) -> Finish:
    return _FINISH_REASONS.get(choice.get("finish_reason") or "", "stop")


def check_model(answer: Mapping[str, Any], names: Collection[str]) -> None:
    """`names` are those of the requested model; a server need not send one."""
    model = answer.get("model")
    if names and isinstance(model, str) and model and model not in names:
        raise ValueError(f"it is from model {model!r}, not {min(names)!r}")


def parse_token_ids(ids: object, name: str, *, vocab_size: int = MAX_VOCAB_SIZE) -> tuple[int, ...]:
    """Integers only: a string or a float is refused, because its meaning would be a guess."""
    if not isinstance(ids, list):
        raise ValueError(f"{name}={ids!r}, not a list")
    # type() and not isinstance(): True is no token id.
    if set(map(type, ids)) - {int}:
        first = next(token for token in ids if type(token) is not int)
        raise ValueError(f"{name} contains {first!r}, not an integer")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        worst = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(f"{name} contains {worst}, outside the vocabulary of {vocab_size:,}")
    return tuple(ids)


def find_logprobs(choice: Mapping[str, Any], name: str) -> list[Any]:
    """The list `name` in the logprobs of a choice; empty if there is none."""
    logprobs = choice.get("logprobs") or {}
    if not isinstance(logprobs, dict):
        raise ValueError(f"logprobs={logprobs!r}, not an object")
    values = logprobs.get(name) or []
    if not isinstance(values, list):
        raise ValueError(f"logprobs.{name}={values!r}, not a list")
    return values


def parse_logprobs(logprobs: Sequence[Any], n_tokens: int) -> tuple[float, ...]:
    """One finite logprob per token."""
    if len(logprobs) != n_tokens:
        raise ValueError(f"{n_tokens} token ids with {len(logprobs)} logprobs")
    if set(map(type, logprobs)) - {float, int} or not all(map(isfinite, logprobs)):
        wrong = next(p for p in logprobs if type(p) not in (float, int) or not isfinite(p))
        raise ValueError(f"a logprob is {wrong!r}, not a finite number")
    if n_tokens and max(logprobs) > MAX_LOGPROB:
        raise ValueError(f"a logprob is {max(logprobs)!r}, above 0")
    return tuple(map(float, logprobs))


def parse_completion(
    choice: Mapping[str, Any],
    logprobs: Sequence[Any],
    *,
    max_tokens: int,
    policy_version: int,
    vocab_size: int = MAX_VOCAB_SIZE,
) -> Completion:
    token_ids = parse_token_ids(choice.get("token_ids"), "token_ids", vocab_size=vocab_size)
    if len(token_ids) > max_tokens:
        raise ValueError(f"{len(token_ids)} token ids, more than max_tokens={max_tokens}")
    return Completion(
        token_ids=token_ids,
        logprobs=parse_logprobs(logprobs, len(token_ids)),
        finish=parse_finish(choice),
        policy_version=policy_version,
    )


def parse_policy_version(answer: Mapping[str, Any], default: int) -> int:
    """The policy version that the server reports; vLLM reports none."""
    version = answer.get("policy_version")
    if version is None:
        return default
    if type(version) is not int or version < 0:
        raise ValueError(f"policy_version={version!r}, not a training step")
    return version


def check_reply(reply: Mapping[str, Any]) -> None:
    """The types of an assistant message; what a field contains may be malformed."""
    fields: Mapping[str, tuple[type, ...]] = {
        "content": (str, list),
        "tool_calls": (list,),
        "malformed_calls": (list,),
    }
    for name, kinds in fields.items():
        if reply.get(name) is not None and not isinstance(reply[name], kinds):
            raise ValueError(f"message.{name}={reply[name]!r}, not a {kinds[0].__name__}")
    if not reply.keys() & {*fields, "role", "reasoning", "reasoning_content"}:
        raise ValueError(f"message={dict(reply)!r}, without role, content or tool_calls")
