"""Naming: the one function that writes a metric's key."""

from __future__ import annotations


def key(*parts: str) -> str:
    """What / where / which. `key("reward", "a/b", "signal_ratio")` is `reward/a_b/signal_ratio`."""
    return "/".join(part.replace("/", "_") for part in parts)
