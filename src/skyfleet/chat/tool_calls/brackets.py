"""Brackets: where one is closed, or what would close it."""

from __future__ import annotations

import re

CLOSING = {"{": "}", "[": "]", "(": ")"}
MAX_OPEN = 200
"""Python's own limit. A text that opens more is no call, and reading on would take long."""


def find_close(text: str, start: int, tokens: re.Pattern[str]) -> tuple[int | None, str]:
    """Where the bracket at `start` is closed; if the text ends before that, what is missing.

    `tokens` finds brackets and whole strings, so that a bracket inside a string is none.
    """
    expected: list[str] = []
    for token in tokens.finditer(text, start):
        if token[0] in CLOSING:
            expected.append(CLOSING[token[0]])
            if len(expected) > MAX_OPEN:
                return None, ""
        elif token[0] in CLOSING.values():
            if not expected or expected.pop() != token[0]:
                return None, ""
            if not expected:
                return token.end(), ""
    return None, "".join(reversed(expected))
