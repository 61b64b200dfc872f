"""Formatting of numbers and configuration values on the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """How a chart formats its values and the labels of its axis."""

    value: Callable[[float], str]
    tick: Callable[[float], str]


def percent(share: float) -> str:
    """`percent(0.488)` is 48.8 %."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def points(difference: float) -> str:
    """Percentage points, always with a sign. Adding zero turns -0.0 into 0.0."""
    return f"{round(100 * difference, 1) + 0.0:+.1f}".replace("-", _MINUS)


def count(number: float) -> str:
    return f"{number:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}".replace("-", _MINUS)


def signed(value: float) -> str:
    """Three significant digits, always with a sign."""
    return f"{round(value, 12) + 0.0:+.3g}".replace("-", _MINUS)


def seconds(value: float) -> str:
    """`seconds(75)` is 1 min 15 s."""
    if value < 60:
        return f"{value:.3g}\N{NO-BREAK SPACE}s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def format_value(value: Any) -> str:
    """A configuration value; a list or a mapping has one line per item."""
    if isinstance(value, list) and value:
        return "\n".join(format_value(item) for item in value)
    if isinstance(value, dict) and value:
        return "\n".join(
            f"{key}: {json.dumps(item, ensure_ascii=False)}" for key, item in value.items()
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


PERCENT = Unit(value=percent, tick=lambda share: f"{100 * share:.3g}\N{NO-BREAK SPACE}%")
NUMBER = Unit(value=number, tick=number)
SECONDS = Unit(value=seconds, tick=seconds)
