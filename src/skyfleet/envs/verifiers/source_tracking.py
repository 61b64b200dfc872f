"""Rewrite a verifier's source so that its strings remember which of their parts are literal.

The jail worker imports this module without site-packages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from skyfleet.envs.verifiers.source_text import WORDS, Tracker

MARKERS = re.compile(r"_ACCUMULATOR|\bApp\b|VERIFY_|JUDGE ERROR")
"""Literals that contain one of these, or are one of `WORDS`, are tracked wherever they stand; others
only in a print."""

_NAME = "__source_text__"


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
        match node:
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[value], keywords=[]) if (
                not isinstance(value, ast.Starred)
            ):
                return _call(node, "show_number", [node.func, self.visit(value)])
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        # A docstring must stay one: `from __future__` may only follow it.
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_word = isinstance(node.value, str) and node.value.casefold() in WORDS
        return self._track(node) if is_word or _is_marked(node) else node

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
            ):
                call = _call(node, "render", [node.func, self.visit(value)])
                call.keywords = [self.visit(keyword) for keyword in node.keywords]
                return call
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
