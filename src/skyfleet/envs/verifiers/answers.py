"""Answers in words: the helpers that verifiers compare them with."""

from __future__ import annotations

import json
import re


def normalized_contains(target: str, blob: object) -> bool:
    """Whether `target` occurs in `blob`, case, punctuation and spaces aside."""
    return _normalized(target) in _normalized(blob)


def normalized_string_comparison(target: str, blob: object) -> bool:
    """Whether both say the same, case, punctuation and spaces aside."""
    return _normalized(target) == _normalized(blob)


def extract_numbers(text: str) -> list[float]:
    """The numbers in a text: `extract_numbers("1,200 of 3.5")` is [1200.0, 3.5]."""
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text.replace(",", ""))]


def contains_number(text: str, target_number: float | str) -> bool:
    """Whether one of the numbers in `text` is the target; a target that is no number never is."""
    try:
        target = float(str(target_number).replace(",", ""))
    except ValueError:
        return False
    return target in extract_numbers(text)


def _normalized(content: object) -> str:
    text = json.dumps(content, sort_keys=True) if isinstance(content, dict | list) else str(content)
    return "".join(character for character in text.lower() if character.isalnum())
