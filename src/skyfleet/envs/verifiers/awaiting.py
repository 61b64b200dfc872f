"""Run `async def` verifiers without an event loop, which the jail does not have.

Fleet calls such a verifier with an environment whose queries are awaited. Here queries return their
rows at once, so `await` has to accept plain values too. The jail worker imports this module without
site-packages.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Generator
from typing import Any

_NAME = "__awaitable__"


def allow_plain_awaits(tree: ast.Module) -> ast.Module:
    """Rewrite a module so that any value can be awaited; `awaiting_names` has the name it needs."""
    rewritten: ast.Module = _Rewriter().visit(tree)
    return ast.fix_missing_locations(rewritten)


def run_to_end(result: object) -> object:
    """Return what a call returned; a coroutine is run first."""
    if not inspect.iscoroutine(result):
        return result
    try:
        while (waits_for := result.send(None)) is None:
            pass  # asyncio.sleep(0)
        raise TypeError(f"awaits {waits_for!r:.100}, which needs an event loop; await queries only")
    except StopIteration as end:
        return end.value
    finally:
        result.close()


class _Ready:
    def __init__(self, value: object) -> None:
        self._value = value

    def __await__(self) -> Generator[None, None, object]:
        return self._value
        yield


def _to_awaitable(value: Any) -> Any:
    return value if hasattr(value, "__await__") else _Ready(value)


class _Rewriter(ast.NodeTransformer):
    def visit_Await(self, node: ast.Await) -> ast.AST:
        self.generic_visit(node)
        node.value = ast.copy_location(
            ast.Call(ast.Name(_NAME, ast.Load()), [node.value], []), node.value
        )
        return node


awaiting_names: dict[str, Any] = {_NAME: _to_awaitable}
