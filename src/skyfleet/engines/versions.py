"""Versions: compared as versions, so that 0.10 comes after 0.9."""

from __future__ import annotations

import re

_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)([^+]*)")
_BEFORE_RELEASE = re.compile(r"[._-]?(?:alpha|beta|pre|dev|rc|a|b|c)(?![a-z])")


def at_least(version: str, least: str) -> bool:
    """`at_least("0.10.2", "0.9")` is true; what does not look like a version is never enough."""
    asked = _ordered(least)
    if asked is None:
        raise ValueError(f"least={least!r} is no version; write it like 0.10.2")
    found = _ordered(version)
    return found is not None and found >= asked


def _ordered(version: str) -> tuple[list[int], bool] | None:
    """Its numbers without zeros at the end, and whether it was released."""
    match = _VERSION.match(version)
    if match is None:
        return None
    numbers = [int(number) for number in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers, _BEFORE_RELEASE.match(match[2]) is None
