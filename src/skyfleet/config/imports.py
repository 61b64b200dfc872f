"""Imports: what a user names as `module:name`, found where they stand or where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from skyfleet.errors import ConfigError


def import_named(target: str, *, key: str) -> Any:
    """The object `target` names; `key` says in the error where it was named."""
    module_name, colon, name = target.partition(":")
    if not colon:
        raise ConfigError(f"{key}={target!r} names no object; write module:name")
    # A console script does not look where it was started; `python -m` would.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}={target!r} cannot be imported: {error}") from error
    except Exception as error:  # the module is the user's: it may raise anything
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key}={target!r} cannot be imported: {told}; correct it") from error


def with_kwargs(
    own: Any, kwargs: Mapping[str, Any], *, named: str, key: str, takes: str
) -> Callable[[Any], Any]:
    """`own` with the settings that `key` holds; ConfigError where one value more does not call it.

    In the error `named` says where it was named, and `takes` what that value is.
    """
    try:
        signature(own).bind(None, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{named} is called with {takes} and {key}={kwargs}: {error}; {_wanted(own, takes)}; see "
            "examples/add_a_loss"
        ) from None
    except ValueError:
        pass  # what is written in C need not tell
    return partial(own, **kwargs)


def _wanted(own: Any, takes: str) -> str:
    if not callable(own):
        return "name a function"
    others = list(signature(own).parameters.values())[1:]
    told = [str(other.replace(annotation=Parameter.empty)) for other in others]
    return f"beside {takes} it takes {', '.join(told) or 'nothing'}"
