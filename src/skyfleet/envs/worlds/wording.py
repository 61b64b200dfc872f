"""Wording: the few ordinary words that worlds are made of, so that a small vocabulary covers them."""

from __future__ import annotations

from typing import Literal, get_args

PEOPLE = ("amy", "bob", "carol", "dan", "eve", "frank", "grace", "henry")

Day = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
DAYS: tuple[Day, ...] = get_args(Day)

REPOS = ("web", "api", "mobile", "billing", "chat", "maps")
_FEATURES = ("login", "search", "upload", "export", "menu", "chart", "cache", "cookie")
_TROUBLES = ("crash", "error", "delay", "typo", "leak", "loop")
ISSUE_TITLES = tuple(f"{feature} {trouble}" for feature in _FEATURES for trouble in _TROUBLES)
LABELS = ("bug", "urgent", "design", "security", "question", "legal")
REMARKS = ("looks good", "please review", "needs tests", "fixed now", "any news", "well done")

CITIES = ("Lisbon", "Paris", "Rome", "Oslo", "Vienna", "Athens")
_MANNERS = ("Harbor", "Garden", "Royal", "Silver", "Sunny", "Grand", "Quiet", "Golden")
_HOUSES = ("House", "Palace", "Inn", "Lodge", "Court", "Villa")
HOTEL_NAMES = tuple(f"{manner} {house}" for manner in _MANNERS for house in _HOUSES)
ROOM_KINDS = ("single", "double", "twin", "suite")

FOLDERS = ("Work", "Travel", "Family", "Archive")
_TOPICS = ("budget", "trip", "party", "garden", "school", "office", "summer", "team")
_PAPERS = ("plan", "report", "list", "photos", "notes", "offer")
SUBJECTS = tuple(f"{topic} {paper}" for topic in _TOPICS for paper in _PAPERS)
EVENTS = ("standup", "review", "lunch", "demo", "planning", "training", "interview", "workshop")
