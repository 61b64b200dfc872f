"""Check that a verifier's source only defines functions, because fleet-python executes it here.

The SDK runs the source of a verifier in the trainer's process to find its function, which it then
calls on the service. Source that does anything while it defines functions is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from skyfleet.errors import VerifierError

_FLEET_LINE = re.compile(
    r"^[ \t]*(@verifier|from fleet|import fleet)\b[^\n(]*(\([^)]*\))?.*$\n?", re.M
)
"""Lines that the SDK removes before it executes the source, by patterns of its own."""
_VERIFIER_CALL = re.compile(r"@verifier\s*\(")
_MODULES = re.compile(
    r"(__future__|asyncio|collections|datetime|decimal|functools|itertools|json|math|re|statistics"
    r"|string|time|typing)\b"
)
"""Modules whose import has no effect besides the import."""
_ANNOTATION = (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.BitOr, ast.Tuple, ast.List)


def strip_to_definitions(code: str) -> str:
    """Return the source without Fleet's imports and decorator; VerifierError if it runs code.

    The SDK finds nothing to remove in the result, so it executes exactly what is checked here.
    """
    source = _FLEET_LINE.sub("", code)
    if _FLEET_LINE.search(source) or _VERIFIER_CALL.search(source):
        raise _refuse("its decorator or imports of fleet are not on lines of their own")
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise VerifierError(f"verifier_code cannot be parsed: {error}; fix it") from error
    for statement in body:
        for node in _list_executed(statement):
            raise _refuse(f"line {node.lineno} runs code when the source is loaded")
    return source


def _refuse(reason: str) -> VerifierError:
    return VerifierError(
        f"verifier_code: {reason}, and fleet-python loads it in this process; define functions only, "
        "set environment.env_class=fleet_task, or set environment.verifier.allow_unconfined=true if "
        "every verifier may do what this user can"
    )


def _list_executed(statement: ast.stmt) -> Iterator[ast.stmt | ast.expr]:
    """Yield what the definition of a module would execute besides harmless assignments."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from statement.decorator_list
            arguments = statement.args
            yield from (one for one in arguments.defaults if not _is_literal(one))
            yield from (one for one in arguments.kw_defaults if one and not _is_literal(one))
            annotated = [
                node.annotation for node in ast.walk(arguments) if isinstance(node, ast.arg)
            ]
            annotations = [one for one in (*annotated, statement.returns) if one is not None]
            yield from (one for one in annotations if not _is_plain_annotation(one))
        case ast.Expr(value=ast.Constant()):
            pass
        case ast.Import(names=names) if all(map(_is_known, (one.name for one in names))):
            pass
        case ast.ImportFrom(module=str(module), level=0) if _is_known(module):
            pass
        case ast.Assign(targets=[ast.Name()], value=value) if _is_literal(value):
            pass
        case _:
            yield statement


def _is_known(module: str) -> bool:
    return _MODULES.match(module) is not None


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_plain_annotation(node: ast.expr) -> bool:
    allowed = (*_ANNOTATION, ast.Constant, ast.expr_context)
    return all(isinstance(part, allowed) for part in ast.walk(node))
