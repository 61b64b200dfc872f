"""Imports: load the object that a key names as `module:name`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from skyfleet.errors import ConfigError


def import_named(target: str, *, key: str) -> Any:
    """The object that `target` names; errors name `key`, which holds it."""
    module_name, colon, name = target.partition(":")
    if not colon:
        raise ConfigError(f"{key}={target!r} names no object; write module:name")
    # Unlike `python -m`, a console script does not search the current folder.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}={target!r} cannot be imported: {error}") from error
    except Exception as error:  # the user's module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key}={target!r} cannot be imported: {reason}; correct it") from error


def bind_kwargs(
    function: Any, kwargs: Mapping[str, Any], *, named: str, key: str, takes: str
) -> Callable[[Any], Any]:
    """`function` with the keyword arguments that `key` holds, to be called with one argument.

    ConfigError if the signature does not fit; it quotes `named`, the setting that names the function,
    and `takes`, what the one argument is.
    """
    try:
        signature(function).bind(None, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{named} is called with {takes} and {key}={kwargs}: {error}; "
            f"{_describe_parameters(function, takes)}; see examples/add_a_loss"
        ) from None
    except ValueError:
        pass  # a function written in C may have no signature
    return partial(function, **kwargs)


def _describe_parameters(function: Any, takes: str) -> str:
    if not callable(function):
        return "name a function"
    others = list(signature(function).parameters.values())[1:]
    names = [str(other.replace(annotation=Parameter.empty)) for other in others]
    return f"beside {takes} it takes {', '.join(names) or 'nothing'}"
