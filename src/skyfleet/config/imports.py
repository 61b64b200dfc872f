"""Imports: what a user names as `module:name`, found where they stand or where it is installed."""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import signature
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


def check_takes(own: Any, target: str, *, key: str, takes: str) -> None:
    """ConfigError where what `target` names cannot be called with one value; `takes` says which."""
    try:
        signature(own).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{key}={target!r} is called with {takes} and nothing else: {error}; see "
            "examples/add_a_loss"
        ) from None
    except ValueError:
        return  # what is written in C need not tell
