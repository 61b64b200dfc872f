"""Vocabulary of the built-in worlds: few ordinary words, so that a small tokenizer covers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

FAMILIES = 4
"""Data seeds that differ modulo this number share no two-word name."""


class Names:
    """All pairs of a first and a second word, partitioned into families that share no pair.

    Every family uses every word, so held-out names consist of words seen in training.
    """

    def __init__(self, firsts: Sequence[str], seconds: Sequence[str]) -> None:
        self._firsts, self._seconds = firsts, seconds

    def in_family(self, family: int) -> list[str]:
        return [
            f"{first} {second}"
            for i, first in enumerate(self._firsts)
            for j, second in enumerate(self._seconds)
            if (i + j) % FAMILIES == family
        ]


PEOPLE = ("amy", "bob", "carol", "dan", "eve", "frank", "grace", "henry")

Day = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
DAYS: tuple[Day, ...] = get_args(Day)

REPOS = ("web", "api", "mobile", "billing", "chat", "maps")
_FEATURES = ("login", "search", "upload", "export", "menu", "chart", "cache", "cookie")
_TROUBLES = ("crash", "error", "delay", "typo", "leak", "loop", "freeze", "flicker")
ISSUE_TITLES = Names(_FEATURES, _TROUBLES)
LABELS = ("bug", "urgent", "design", "security", "question", "legal")
REMARKS = ("looks good", "please review", "needs tests", "fixed now", "any news", "well done")

CITIES = ("Lisbon", "Paris", "Rome", "Oslo", "Vienna", "Athens")
_MANNERS = ("Harbor", "Garden", "Royal", "Silver", "Sunny", "Grand", "Quiet", "Golden")
_HOUSES = ("House", "Palace", "Inn", "Lodge", "Court", "Villa", "Tower", "Manor")
HOTEL_NAMES = Names(_MANNERS, _HOUSES)
ROOM_KINDS = ("single", "double", "twin", "suite")

FOLDERS = ("Work", "Travel", "Family", "Archive")
_TOPICS = (
    "budget",
    "trip",
    "party",
    "garden",
    "school",
    "office",
    "summer",
    "team",
    "client",
    "house",
)
_PAPERS = ("plan", "report", "list", "photos", "notes", "offer", "form", "draft")
SUBJECTS = Names(_TOPICS, _PAPERS)
EVENTS = ("standup", "review", "lunch", "demo", "planning", "training", "interview", "workshop")
