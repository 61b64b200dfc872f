"""Answers in words: the helpers that verifiers compare them with."""

from __future__ import annotations

import json
import re
import string

_SPACE_FOR_PUNCTUATION = str.maketrans(string.punctuation, " " * len(string.punctuation))


def normalized_contains(target: str, blob: object) -> bool:
    """Whether `target` occurs in `blob`, case, ASCII punctuation and spaces aside."""
    return _normalized(target) in _normalized(_text(blob))


def normalized_string_comparison(target: str, blob: object) -> bool:
    """Whether both say the same, case, ASCII punctuation and spaces aside."""
    return _normalized(target) == _normalized(_text(blob))


def extract_numbers(text: str) -> list[float]:
    """The numbers in a text: `extract_numbers("1,200 of 3.5")` is [1200.0, 3.5]."""
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text.replace(",", ""))]


def contains_number(text: str, target_number: float | str) -> bool:
    """Whether one of the numbers in `text` is the target; a text that is no number never is."""
    numbers = extract_numbers(text)
    if isinstance(target_number, str):
        target_number = target_number.replace(",", "")
    try:
        return float(target_number) in numbers
    except ValueError:
        return False


def _text(content: object) -> str:
    return json.dumps(content, sort_keys=True) if isinstance(content, dict | list) else str(content)


def _normalized(text: str) -> str:
    return "".join(text.lower().translate(_SPACE_FOR_PUNCTUATION).split())
