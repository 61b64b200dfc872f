"""Rules that recognise when a model fails at playing the user, which says nothing about the agent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from skyfleet.envs.users.scenario import Scenario
from skyfleet.envs.users.user import STOP, UserFailure, UserFailureKind

LOOP_REPEATS = 3
"""The same sentence so often in one message, or the same message in so many turns, is a loop."""
MIN_LOOP_WORDS = 4
"""Shorter messages, such as `Yes, please.`, are repeated for good reasons."""

_CHARACTER = {
    "says that it is a model": re.compile(
        r"\bas an? (?:\w+ )?(?:ai|assistant|language model)\b|\b(?:i am|i'm) an? (?:\w+ )?"
        r"(?:ai|assistant|chatbot|language model)\b|\blanguage model\b",
        re.IGNORECASE,
    ),
    "speaks as the agent": re.compile(
        r"\bhow (?:can|may) i (?:help|assist)\b|\b(?:happy|glad|here) to (?:help|assist) you\b"
        r"|\banything else (?:that )?i can (?:help|assist|do)\b"
        r"|\bthank(?:s| you) for (?:contacting|calling|reaching out)\b"
        r"|\b(?:i|we)(?:'ve| have| will|'ll)? (?:now )?(?:processed|verified|cancelled|canceled|updated"
        r"|issued|refunded|checked) (?:your|the)\b"
        r"|\b(?:could|can|would|may|please) (?:you )?(?:please )?(?:i have|provide|give me|tell me|confirm)"
        r" (?:\w+ )?your (?:\w+ )?(?:name|pin|account|number|phone|email|birth|date|order|address|id)\b"
        r"|\bi apologi[sz]e for (?:the|any) (?:inconvenience|confusion|delay)\b"
        r"|\bi(?:'ll| will| can) (?:help|assist) you\b",
        re.IGNORECASE,
    ),
    "writes a speaker's label": re.compile(
        r"^\s*(?:\*\*|\[)?(?:user|customer|patient|client|assistant|agent|system|representative)"
        r"(?:\*\*|\])?\s*:",
        re.IGNORECASE | re.MULTILINE,
    ),
    "writes a tool call or markup": re.compile(r"</?tool_call|\{\s*\"name\"\s*:|```|<\|\w+\|>"),
    "talks about its instructions": re.compile(
        r"\b(?:my|the|your) instructions?\b|\bscenario\b|\brole-?play|\bsimulat|\bthe user (?:wants|should"
        r"|is|has|would)\b|\bthis conversation\b",
        re.IGNORECASE,
    ),
}
_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


def find_failure(
    scenario: Scenario, agent_messages: Sequence[str], user_messages: Sequence[str], text: str
) -> UserFailure | None:
    """Judge the user's next message `text` after the messages exchanged so far; None: no rule applies.

    `user_messages` starts with the opening; `agent_messages` answers it.
    """
    bare = text.replace(STOP, " ")
    if not _WORD.search(bare):
        if STOP in text:
            return None
        return UserFailure(kind=UserFailureKind.EMPTY_REPLY, detail="the message has no words")
    return (
        _find_loop(agent_messages, user_messages, bare)
        or _find_leak(scenario, agent_messages, user_messages, bare)
        or _find_break(scenario, bare)
    )


def _find_loop(
    agent_messages: Sequence[str], user_messages: Sequence[str], text: str
) -> UserFailure | None:
    sentences = [one for one in map(_normalize, _SENTENCE_END.split(text)) if one]
    for sentence in dict.fromkeys(sentences):
        if sentences.count(sentence) >= LOOP_REPEATS:
            detail = f"it repeats {sentence[:60]!r} {sentences.count(sentence)} times"
            return UserFailure(kind=UserFailureKind.LOOP, detail=detail)
    n_before = LOOP_REPEATS - 1
    repeated = [_normalize(one) for one in user_messages[-n_before:]]
    same = _normalize(text)
    if len(repeated) < n_before or set(repeated) != {same} or len(same.split()) < MIN_LOOP_WORDS:
        return None
    # An agent that repeats itself gets the same answer.
    asked = {_normalize(one) for one in agent_messages[-n_before:]}
    if len(asked) < n_before:
        return None
    detail = f"the same message {LOOP_REPEATS} times, to different questions"
    return UserFailure(kind=UserFailureKind.LOOP, detail=detail)


def _find_leak(
    scenario: Scenario, agent_messages: Sequence[str], user_messages: Sequence[str], text: str
) -> UserFailure | None:
    known = _normalize(" ".join([*agent_messages, *user_messages, *_list_sentences(scenario)]))
    for secret in scenario.secrets:
        needle = _normalize(secret)
        if needle and _contains(_normalize(text), needle) and not _contains(known, needle):
            detail = f"it says {secret!r}, which only the agent can look up"
            return UserFailure(kind=UserFailureKind.LEAKED_ANSWER, detail=detail)
    return None


def _find_break(scenario: Scenario, text: str) -> UserFailure | None:
    own = " ".join(_list_sentences(scenario))
    for what, pattern in _CHARACTER.items():
        match = pattern.search(text)
        if match is not None and match[0] not in own:
            detail = f"it {what}: {match[0].strip()!r:.80}"
            return UserFailure(kind=UserFailureKind.BROKE_CHARACTER, detail=detail)
    return None


def _list_sentences(scenario: Scenario) -> Iterator[str]:
    yield scenario.statement
    yield from scenario.changes_of_mind
    yield from scenario.objections
    yield from (fact.text for fact in scenario.declines)


def _normalize(text: str) -> str:
    return " ".join(re.findall(r"\w+(?:\.\d+)?", text.casefold()))


def _contains(words: str, needle: str) -> bool:
    return f" {needle} " in f" {words} "
