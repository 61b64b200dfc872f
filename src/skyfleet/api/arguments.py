"""Keyword arguments that several functions share, declared once as a TypedDict."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from skyfleet.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def show_arguments(declared: type) -> Callable[[F], F]:
    """Make `help()` and notebooks list the declared arguments instead of `**arguments`."""

    def decorate(function: F) -> F:
        shown = inspect.signature(function)
        named = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in declared.__annotations__
        ]
        function.__dict__["__signature__"] = shown.replace(parameters=[*named, *keywords])
        return function

    return decorate


def check_arguments(where: str, given: Mapping[str, Any], declared: type) -> None:
    """ConfigError for an argument that is not declared; `where` is the call."""
    known = list(declared.__annotations__)
    for name in sorted(given.keys() - set(known)):
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the arguments are {', '.join(known)};"
        raise ConfigError(
            f"{where}({name}=...) is not an argument; {hint} A configuration key is set by "
            f'config={{"key": value}}'
        )
