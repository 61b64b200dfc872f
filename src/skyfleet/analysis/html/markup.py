"""Markup: HTML in which a plain string is always text.

Only `tag` and `join` make `Html`, and both escape whatever is not; so a run's names, prompts and
answers can go anywhere on the page without a thought.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = frozenset({"meta", "br", "hr", "link"})

Attribute = str | float | bool | None


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | Iterable[str] | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """`tag("td", "a<b", class_="num")` is `<td class="num">a&lt;b</td>`.

    A trailing underscore is dropped and the others are hyphens; None and False leave an attribute
    out, True leaves it bare.
    """
    opened = "".join([name, *(_attribute(key, value) for key, value in attributes.items())])
    if name in _VOID:
        return Html(f"<{opened}>")
    return Html(f"<{opened}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """All of it in order; strings that are not markup are escaped."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, str):
            parts.append(_escaped(child))
        elif child is not None:
            parts.extend(_escaped(one) for one in child)
    return Html("".join(parts))


def _escaped(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


def _attribute(key: str, value: Attribute) -> str:
    name = key.removesuffix("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{escape(f"{value:g}" if isinstance(value, float) else str(value))}"'
