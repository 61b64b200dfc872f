"""Know which parts of a verifier's output its own source wrote, and which parts are values.

A verifier prints its result lines (`>>> SUCCESS_ACCUMULATOR >>>`, `App mail: 1`, `JUDGE ERROR:`)
on the same stream as texts that it quotes, and an agent chooses those. So the strings of the
source are compiled to `SourceText`, which remembers what was literal and what was inserted. The
jail worker imports this module without site-packages.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MARKERS = re.compile(r"_ACCUMULATOR|\bApp\b|VERIFY_|JUDGE ERROR")
"""Literals that contain one of these are tracked wherever they stand; others only in a print."""

_NAME = "__source_text__"
_TOKEN = re.compile(r"\0(\d+)\0")
_MARK = "\0"


class SourceText(str):
    """A string with its skeleton: literal parts as they are, each inserted value as a token."""

    __slots__ = ("skeleton", "tracker")

    skeleton: str
    tracker: Tracker

    def __add__(self, other: Any, /) -> Any:
        return self.tracker.concatenate(self, other)

    def __radd__(self, other: Any, /) -> Any:
        return self.tracker.concatenate(other, self)


class Tracker:
    """Makes SourceText while one verifier runs; compiled source calls it as `__source_text__`."""

    def __init__(self) -> None:
        self._values: list[object] = []
        self._known: dict[str, str] = {}

    def make(self, text: str, skeleton: str) -> SourceText:
        made = SourceText(text)
        made.skeleton, made.tracker = skeleton, self
        return made

    def literal(self, text: str) -> SourceText:
        return self.make(text, text.replace(_MARK, ""))

    def skeleton_of(self, value: object) -> str:
        """Return literal parts, numbers and the words SUCCESS and ERROR as they are.

        Any other value is a token, so no text of an agent has a line, a marker or a number in it.
        """
        if isinstance(value, SourceText):
            return value.skeleton
        if type(value) in (int, float):
            return str(value)
        if isinstance(value, str):
            text = str(value)
            if text in ("SUCCESS", "ERROR"):
                return text
            if text not in self._known:
                # The same text is the same token: an app is found by its name in two lines.
                self._known[text] = self._keep(text)
            return self._known[text]
        # Of a list only the length counts, as it is now.
        return self._keep(Entries(list.__len__(value)) if isinstance(value, list) else str(value))

    def _keep(self, value: object) -> str:
        self._values.append(value)
        return f"{_MARK}{len(self._values) - 1}{_MARK}"

    def find_value(self, skeleton: str) -> object:
        """Return the value if the skeleton is exactly one token, else the skeleton itself."""
        found = _TOKEN.fullmatch(skeleton)
        return self._values[int(found[1])] if found else skeleton

    def expand(self, skeleton: str) -> str:
        """Put the values back."""
        return _TOKEN.sub(lambda found: str(self._values[int(found[1])]), skeleton)

    # What compiled source calls:

    def interpolate(self, *parts: object) -> SourceText:
        return self.make("".join(map(str, parts)), "".join(map(self.skeleton_of, parts)))

    def insert(self, value: object, conversion: int, spec: str) -> object:
        """Format one value of an f-string; a list keeps its length, a number its text."""
        convert = _CONVERSIONS.get(conversion)
        text = format(convert(value) if convert else value, spec)
        if isinstance(value, SourceText) and conversion != ord("r") and not spec:
            return value
        is_whole = isinstance(value, list) and not spec
        return self.make(text, self.skeleton_of(value)) if is_whole else self._insert(value, text)

    def _insert(self, value: object, text: str) -> object:
        return self.make(text, text) if type(value) in (int, float) else text

    def concatenate(self, left: Any, right: Any) -> Any:
        plain = [str(one) if isinstance(one, SourceText) else one for one in (left, right)]
        total = plain[0] + plain[1]
        if not isinstance(left, SourceText) and not isinstance(right, SourceText):
            return total
        return self.make(total, self.skeleton_of(left) + self.skeleton_of(right))

    def join(self, separator: str, items: Iterable[str]) -> str:
        items = list(items)
        text = str.join(separator, items)
        return self.make(text, separator.join(map(self.skeleton_of, items)))

    def format(self, template: str, *values: object, **named: object) -> str:
        text = str.format(template, *values, **named)
        try:
            skeleton = template.replace(_MARK, "").format(
                *map(self._quote, values), **{k: self._quote(v) for k, v in named.items()}
            )
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            return text  # a template that reads attributes or items: nothing in it counts
        return self.make(text, skeleton)

    def percent(self, template: str, values: Any) -> str:
        text = str.__mod__(template, values)
        quoted = tuple(map(self._quote, values)) if isinstance(values, tuple) else None
        try:
            skeleton = template.replace(_MARK, "") % (quoted or self._quote(values))
        except (KeyError, TypeError, ValueError):
            return text
        return self.make(text, skeleton)

    def _quote(self, value: object) -> object:
        return value if type(value) in (int, float) else _Quoted(self.skeleton_of(value))

    def render(self, show: Callable[[Any], str], value: object) -> str:
        """`str(items)`, `repr(items)` and `json.dumps(items)` are still the list."""
        text = show(value)
        is_list = isinstance(value, list) and show in (str, repr, json.dumps)
        return self.make(text, self.skeleton_of(value)) if is_list else text


_CONVERSIONS: dict[int, Callable[[object], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}


class Entries(int):
    """The number of entries of a printed list."""


class _Quoted:
    def __init__(self, skeleton: str) -> None:
        self._skeleton = skeleton

    def __str__(self) -> str:
        return self._skeleton

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return self._skeleton


def track_source(tree: ast.Module) -> ast.Module:
    """Rewrite the strings of a module; the names that it needs are in `tracking_names`."""
    rewritten: ast.Module = _Rewriter().visit(tree)
    return ast.fix_missing_locations(rewritten)


def tracking_names(tracker: Tracker) -> dict[str, Any]:
    return {_NAME: tracker}


class _Rewriter(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            node.args = [self._track(argument) for argument in node.args]
            for keyword in node.keywords:
                tracked = keyword.arg in ("sep", "end")
                keyword.value = (self._track if tracked else self.visit)(keyword.value)
            return node
        if MARKERS.search("".join(_literals(node.func))):
            return self._track(node)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        # A docstring must stay one: `from __future__` may only follow it.
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return self._track(node) if _is_marked(node) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        if _is_marked(node):
            return self._track(node)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                part.value = self.visit(part.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        return self._track(node) if _is_marked(node) else self.generic_visit(node)

    def visit_List(self, node: ast.List) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and any(map(_is_marked, node.elts)):
            node.elts = [self._track(element) for element in node.elts]
            return node
        return self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        # A pattern must stay a constant.
        node.guard = self.visit(node.guard) if node.guard else None
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def _track(self, node: ast.expr) -> ast.expr:
        """Return an expression of the same value that remembers its literals, if it has any."""
        match node:
            case ast.Constant(value=str()):
                return _call(node, "literal", [node])
            case ast.JoinedStr():
                return _call(node, "interpolate", [self._track_part(part) for part in node.values])
            case ast.BinOp(op=ast.Add()):
                return _call(node, "concatenate", [self._track(node.left), self._track(node.right)])
            case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str())):
                return _call(node, "percent", [node.left, self.visit(node.right)])
            case ast.IfExp():
                node.test = self.visit(node.test)
                node.body, node.orelse = self._track(node.body), self._track(node.orelse)
                return node
            case ast.Call():
                return self._track_call(node)
        visited: ast.expr = self.visit(node)
        return visited

    def _track_call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(value=str()) as text, attr="join"),
                args=[items],
                keywords=[],
            ):
                if isinstance(items, ast.List | ast.Tuple):
                    items.elts = [self._track(element) for element in items.elts]
                else:
                    items = self.visit(items)
                return _call(node, "join", [text, items])
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(value=str()) as text, attr="format")
            ):
                call = _call(node, "format", [text, *map(self.visit, node.args)])
                call.keywords = [self.visit(keyword) for keyword in node.keywords]
                return call
            case ast.Call(
                func=ast.Name(id="str" | "repr") | ast.Attribute(attr="dumps"),
                args=[value],
                keywords=[],
            ):
                return _call(node, "render", [node.func, self.visit(value)])
        visited = self.visit_Call(node) if _is_plain_call(node) else self.generic_visit(node)
        assert isinstance(visited, ast.expr)
        return visited

    def _track_part(self, part: ast.expr) -> ast.expr:
        if not isinstance(part, ast.FormattedValue):
            return _call(part, "literal", [part])
        spec = part.format_spec or ast.Constant("")
        return _call(part, "insert", [self._track(part.value), ast.Constant(part.conversion), spec])


def _is_plain_call(node: ast.Call) -> bool:
    """Whether `visit_Call` would not track the call again."""
    return not MARKERS.search("".join(_literals(node.func)))


def _is_marked(node: ast.expr) -> bool:
    """Whether a string, or a sum or format of strings, has a marker among its literals."""
    return MARKERS.search("".join(_literals(node))) is not None


def _literals(node: ast.expr) -> Sequence[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr():
            return [text for part in node.values for text in _literals(part)]
        case ast.BinOp(op=ast.Add()):
            return [*_literals(node.left), *_literals(node.right)]
        case ast.BinOp(op=ast.Mod()) | ast.Attribute(attr="format" | "join"):
            return _literals(node.left if isinstance(node, ast.BinOp) else node.value)
    return []


def _call(node: ast.expr, method: str, arguments: list[ast.expr]) -> ast.Call:
    tracker = ast.Attribute(ast.Name(_NAME, ast.Load()), method, ast.Load())
    return ast.copy_location(ast.Call(tracker, arguments, []), node)
