"""Blocks: what sections are built of: tables, folds, grids, commands to copy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    style: str
    """`num` for numbers, `text` for words, `prose` for sentences, `value` for settings, `draw`
    for a small chart."""


def columns(
    *names: str,
    text: Collection[str] = (),
    prose: Collection[str] = (),
    value: Collection[str] = (),
    draw: Collection[str] = (),
) -> list[Column]:
    """Numbers, but for those named."""
    styles = {
        **dict.fromkeys(text, "text"),
        **dict.fromkeys(prose, "prose"),
        **dict.fromkeys(value, "value"),
        **dict.fromkeys(draw, "draw"),
    }
    return [Column(name=name, style=styles.get(name, "num")) for name in names]


def table(
    caption: str,
    head: Sequence[Column],
    rows: Iterable[Sequence[Child]],
    *,
    strong: Collection[int] = (),
    quiet: Collection[int] = (),
) -> Html:
    """The first cell of a row names it; `strong` rows sum up those above, `quiet` ones are grey."""
    styles = {**dict.fromkeys(quiet, "unclear"), **dict.fromkeys(strong, "strong")}
    body = [
        tag("tr", _cells(head, row), class_=styles.get(number)) for number, row in enumerate(rows)
    ]
    names = [tag("th", column.name, scope="col", class_=column.style) for column in head]
    inner = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", names)),
        tag("tbody", body),
    )
    # A table wider than the screen scrolls by itself, also by keyboard.
    return tag("div", inner, class_="wide", tabindex="0", role="group", aria_label=caption)


def section(anchor: str, title: str, *body: Child) -> Html:
    heading = tag("h2", title, id=f"{anchor}-title")
    return tag("section", heading, *body, id=anchor, aria_labelledby=f"{anchor}-title")


def note(*text: Child) -> Html:
    return tag("p", *text, class_="note")


def fold(summary: Child, *body: Child, opened: bool = False, style: str | None = None) -> Html:
    return tag("details", tag("summary", summary), *body, open=opened, class_=style)


def grid(items: Iterable[Html], *, span: int) -> Html:
    """Each item takes `span` of twelve columns on a wide screen."""
    cells = [tag("div", item, class_=f"span-{span}") for item in items]
    return tag("div", cells, class_="grid")


def command(text: str) -> Html:
    """A command line with a button that copies it; without script it can be marked by hand."""
    button = tag(
        "button", "Copy", type="button", class_="copy", hidden=True, aria_label="Copy the command"
    )
    return tag("span", tag("code", text), button, class_="command")


def legend(items: Iterable[tuple[str, str]]) -> Html:
    """Pairs of a class that colours and what it stands for."""
    keys = [tag("li", tag("span", class_=f"key {style}"), name) for style, name in items]
    return tag("ul", keys, class_="legend")


def paragraphs(sentences: Iterable[str]) -> Html:
    return join(note(sentence) for sentence in sentences)


def _cells(head: Sequence[Column], row: Sequence[Child]) -> Html:
    first, *others = zip(head, row, strict=True)
    return join(
        tag("th", first[1], scope="row", class_=first[0].style),
        [tag("td", child, class_=column.style) for column, child in others],
    )
