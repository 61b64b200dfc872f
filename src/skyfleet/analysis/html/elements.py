"""HTML elements: escaped markup, tables, folds, grids and commands to copy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape

_VOID = frozenset({"meta", "br", "hr", "link"})

Attribute = str | float | bool | None


class Html(str):
    """A string that is already markup and is not escaped again."""

    __slots__ = ()


Child = str | Iterable[str] | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """`tag("td", "a<b", class_="num")` is `<td class="num">a&lt;b</td>`.

    In attribute names a trailing underscore is dropped and the others become hyphens. None and
    False omit an attribute; True writes it without a value.
    """
    opened = "".join([name, *(_attribute(key, value) for key, value in attributes.items())])
    if name in _VOID:
        return Html(f"<{opened}>")
    return Html(f"<{opened}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Concatenate the children; escapes strings that are not markup."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, str):
            parts.append(_escape(child))
        elif child is not None:
            parts.extend(_escape(one) for one in child)
    return Html("".join(parts))


def _escape(text: str) -> str:
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
    """Number columns, except those named in an argument."""
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
    """The first cell is the row header; `strong` rows are totals, `quiet` rows are grey."""
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
    # A table wider than the screen scrolls on its own, also with the keyboard.
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
    """A command line with a copy button; without JavaScript it can be selected by hand."""
    button = tag(
        "button", "Copy", type="button", class_="copy", hidden=True, aria_label="Copy the command"
    )
    return tag("span", tag("code", text), button, class_="command")


def legend(items: Iterable[tuple[str, str]]) -> Html:
    """Pairs of a CSS class and its label."""
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
