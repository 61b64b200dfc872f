"""Rules that say what an agent's message asks for, as scripted and rule-based users read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from skyfleet.envs.users.scenario import Fact

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_REQUEST = re.compile(
    r"\?\s*$|^(?:and |so |then |now |first,? )?(?:tell me|give me|let me know|send|share|provide|state"
    r"|enter|specify|confirm|what|which)\b|\bplease (?:tell|give|let|send|share|provide|state|enter"
    r"|specify|confirm|verify|say|name|choose)\b|\bi(?:'ll| will| would)?(?: also)? (?:need|require|like to know)\b",
    re.IGNORECASE,
)
_CONFIRMATION = re.compile(
    r"\b(confirm|shall i|should i|(?:may|can) i (?!have|get|ask|know|see)|do you want|would you like"
    r"|go ahead|proceed|do you agree|do you accept|are you sure"
    r"|is (?:that|this|it) (?:right|correct|ok|okay|fine))\b|\byes/no\b",
    re.IGNORECASE,
)
_OPEN_QUESTION = re.compile(
    r"\b(?:what|which|who|whose|when|where|how (?:many|much|long|often))\b|\bconfirm your (?:full )?"
    r"(?:name|pin|identity|date|birth|phone|address|e-?mail|account|number)\b",
    re.IGNORECASE,
)
_ANYTHING_ELSE = re.compile(
    r"\b(anything|something) (else|more|further)\b|\bfurther (help|assistance|questions)\b"
    r"|\bother (questions|requests)\b",
    re.IGNORECASE,
)
_WAITING = re.compile(
    r"\b(let me|one moment|a moment|hold on|please wait|just a (?:second|minute|moment)|i(?:'| wi)ll"
    r" (?:now )?(?:check|look|verify|see|find))\b",
    re.IGNORECASE,
)


def find_requests(message: str) -> list[str]:
    """Return the sentences that ask for something."""
    sentences = filter(None, map(str.strip, _SENTENCE_END.split(message)))
    return [sentence for sentence in sentences if _REQUEST.search(sentence)]


def asks_for(fact: Fact, requests: Sequence[str]) -> bool:
    """Whether one of the sentences contains a word of `Fact.asked_by`."""
    pattern = _build_pattern(fact.asked_by)
    return any(pattern.search(sentence) for sentence in requests)


@lru_cache(maxsize=4096)
def _build_pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    choices = "|".join(re.escape(word) for word in words)
    return re.compile(rf"\b(?:{choices})(?:s|es)?\b", re.IGNORECASE)


def asks_to_confirm(message: str) -> bool:
    """Whether the agent asks for a yes. `Which card do you want?` asks for more than that."""
    return any(
        _CONFIRMATION.search(sentence) and not _OPEN_QUESTION.search(sentence)
        for sentence in find_requests(message)
    )


def offers_more(message: str) -> bool:
    """Whether the agent asks if there is anything else."""
    return _ANYTHING_ELSE.search(message) is not None


def asks_to_wait(message: str) -> bool:
    return _WAITING.search(message) is not None and "?" not in message
