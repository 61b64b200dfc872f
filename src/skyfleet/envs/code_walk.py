"""Follow a user's code from an environment to everything that it reaches, and hash it.

From the environment or the reward it goes through classes, closures, defaults and global names, to
functions and to values such as a threshold. Code of skyfleet, of Python and of installed packages is
not followed, except of the package that has the environment itself. A variable that the code itself
changes, such as a cache, is left out.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from importlib import import_module
from importlib.util import find_spec, resolve_name
from itertools import islice
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from skyfleet.envs.code_references import References, find_references, hash_code
from skyfleet.tasks.content_hash import canonicalize, describe_object, hash_value

_MAX_OBJECTS = 3000
"""Functions, classes and values; a larger program is compared in the first of them."""
_MAX_ITEMS = 100_000
"""Of a list or dict; larger ones are compared by their size."""
_DATA = (str, int, float, bool, bytes, complex, type(None), re.Pattern, Enum)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_INSTALLED = {"site-packages", "dist-packages"}
_SETTINGS = {"ToolEnv.max_turns", "ToolEnv.name"}
"""These are in the configuration and in the tasks."""


def hash_reached_code(given: Sequence[object]) -> dict[str, str]:
    """By the name of each function and value that the objects reach."""
    return _Walk().run(given)


@dataclass(frozen=True, slots=True)
class _Found:
    """An object that code refers to, by the name that it has there."""

    name: str
    value: Any
    is_root: bool = False
    """Whether skyfleet itself refers to it: it is the environment or a part of it."""
    keeps_doc: bool = False
    """Whether an agent may read its docstring: a method may be a tool."""
    is_attribute: bool = False
    receiver: Any = None
    """The object that a method is called on, if only what this method reaches of it counts."""


class _Walk:
    def __init__(self) -> None:
        self._queue: list[_Found] = []
        self._seen: dict[int, Any] = {}  # the objects too: a freed one would free its id
        self._packages: set[str] = set()
        self._values: list[_Found] = []
        self._hashes: dict[str, list[str]] = {}
        self._changed_variables: set[str] = set()
        self._changed_attributes: set[str] = set()

    def run(self, given: Sequence[object]) -> dict[str, str]:
        self._queue += [_Found("env", one, is_root=True) for one in given]
        for at in range(_MAX_OBJECTS):
            if at >= len(self._queue):
                break
            self._visit(self._queue[at])
        # Values last, when it is known which of them the code changes.
        for found in self._values:
            changed = self._changed_attributes if found.is_attribute else self._changed_variables
            if found.name.rpartition(".")[2] not in changed:
                self._note(found.name, self._encode(found.value))
        return {name: hash_value(sorted(parts)) for name, parts in sorted(self._hashes.items())}

    def _note(self, name: str, content: object) -> None:
        self._hashes.setdefault(name, []).append(hash_value(content))

    def _visit(self, found: _Found) -> None:
        value = found.value
        if isinstance(value, _DATA):
            self._values.append(found)
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, _CONTAINERS):
            self._values.append(found)
            self._add_all(found, islice(_list_objects(value), _MAX_OBJECTS))
        elif isinstance(value, MethodType) and self._is_user(type(value.__self__).__module__):
            self._queue.append(replace(found, value=value.__func__, receiver=value.__self__))
        elif inner := list(_unwrap(value)):
            self._add_all(found, inner)
        elif isinstance(value, FunctionType):
            self._visit_function(found, value)
        elif isinstance(value, type):
            self._visit_class(found, value)
        elif not isinstance(value, ModuleType):
            self._visit_instance(found, value)

    def _add_all(self, found: _Found, values: Iterable[Any]) -> None:
        for value in values:
            self._queue.append(_Found(found.name, value, found.is_root, found.keeps_doc))

    def _visit_function(self, found: _Found, function: FunctionType) -> None:
        is_user = self._is_user(function.__module__, is_root=found.is_root)
        closure = dict(
            zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        ).items()
        cells = [(name, cell.cell_contents) for name, cell in closure if _is_set(cell)]
        if not is_user:
            # Of skyfleet or a library: the user's code may be inside, its own data may be state.
            is_root = found.is_root and function.__module__.startswith("skyfleet.")
            for name, value in cells:
                if not isinstance(value, (*_DATA, *_CONTAINERS)):
                    self._queue.append(_Found(name, value, is_root))
            return
        references = find_references(function.__code__)
        self._changed_variables |= references.changed_variables
        if function.__name__ not in ("__init__", "__post_init__", "__new__"):
            self._changed_attributes |= references.changed_attributes
        name = _name_function(function, found.name)
        self._note(name, hash_code(function.__code__, keeps_doc=found.keeps_doc))
        self._queue += [
            _Found(f"{name}({parameter})", value)
            for parameter, value in _list_defaults(function)
            if parameter not in references.changed_locals
        ]
        self._queue += [_Found(name, value) for name, value in cells]
        self._queue += self._resolve(references, function.__globals__)
        if found.receiver is not None:
            self._queue += _resolve_attributes(references, found.receiver)

    def _resolve(
        self, references: References, global_values: Mapping[str, Any]
    ) -> Iterator[_Found]:
        for path in sorted(references.names):
            first, *attributes = path
            if first in global_values and not first.startswith("__"):
                yield from self._follow(first, global_values[first], attributes)
        for module_name, path in sorted(references.imports):
            module = self._import(module_name, global_values.get("__package__"))
            if module is not None:
                yield from self._follow(module_name, module, list(path))

    def _follow(self, name: str, value: Any, attributes: list[str]) -> Iterator[_Found]:
        """`grade` of `graders.grade`, if that is a module of the user's."""
        for attribute in attributes:
            if not isinstance(value, ModuleType) or not self._is_user(value.__name__):
                break
            name, value = attribute, getattr(value, attribute, None)
        yield _Found(name, value)

    def _import(self, name: str, package: str | None) -> ModuleType | None:
        """A module that a function imports when it is called, if it is the user's."""
        try:
            name = resolve_name(name, package)
            spec = find_spec(name) if name not in sys.modules else None
            if spec is not None and self._is_library(name, spec.origin or ""):
                return None
            module = import_module(name)
        except Exception:  # the user's module may raise anything; the function will show it
            return None
        return module if self._is_user(name) else None

    def _visit_class(self, found: _Found, given: type) -> None:
        for owner in given.__mro__:
            if not self._is_user(owner.__module__, is_root=found.is_root and owner is given):
                continue
            for attribute, value in vars(owner).items():
                name = f"{_cut_locals(owner.__qualname__)}.{attribute}"
                is_data = isinstance(value, (*_DATA, *_CONTAINERS))
                if not (is_data and attribute.startswith("__")):
                    self._queue.append(_Found(name, value, keeps_doc=True, is_attribute=is_data))

    def _visit_instance(self, found: _Found, value: Any) -> None:
        kind = type(value)
        is_user = self._is_user(kind.__module__, is_root=found.is_root)
        if not is_user and not kind.__module__.startswith("skyfleet."):
            return
        if is_user and callable(value) and not hasattr(kind, "reset"):
            self._queue.append(_Found(found.name, value.__call__, found.is_root))
            return
        self._queue.append(_Found(found.name, kind, found.is_root))
        for attribute, item in _list_attributes(value):
            is_data = isinstance(item, (*_DATA, *_CONTAINERS))
            name = f"{_cut_locals(kind.__qualname__)}.{attribute}" if is_data else attribute
            # The private data of skyfleet's objects are their state.
            is_state = is_data and (attribute.startswith("_") or item is None)
            if is_user or not (is_state or name in _SETTINGS):
                self._queue.append(
                    _Found(name, item, found.is_root and not is_user, is_attribute=is_data)
                )

    def _is_user(self, module_name: str | None, *, is_root: bool = False) -> bool:
        name = module_name or "__main__"
        if name == "__main__":
            return True
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        package = name.partition(".")[0]
        if is_root and package != "skyfleet" and package not in sys.stdlib_module_names:
            self._packages.add(package)
        return not self._is_library(name, file or "")

    def _is_library(self, module_name: str, file: str) -> bool:
        package = module_name.partition(".")[0]
        if package == "skyfleet" or package in sys.stdlib_module_names:
            return True
        return package not in self._packages and not _INSTALLED.isdisjoint(Path(file).parts)

    def _encode(self, value: Any) -> Any:
        if isinstance(value, _CONTAINERS) and len(value) > _MAX_ITEMS:
            return [type(value).__name__, len(value)]
        try:
            return canonicalize(value, _describe)
        except RecursionError:
            return type(value).__name__


def _describe(value: object) -> str:
    """Objects other than plain values are visited by themselves, if they can be."""
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}={value.value!r}"
    if isinstance(value, _DATA):
        return describe_object(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _resolve_attributes(references: References, receiver: Any) -> Iterator[_Found]:
    """The attributes and methods of the receiver that its method refers to."""
    kind, own = type(receiver), _get_attributes(receiver)
    for attribute in sorted(references.attributes):
        value = own.get(attribute, inspect.getattr_static(kind, attribute, None))
        is_data = isinstance(value, (*_DATA, *_CONTAINERS))
        if isinstance(value, property):
            value = value.fget
        if value is not None:
            name = f"{_cut_locals(kind.__qualname__)}.{attribute}" if is_data else attribute
            is_method = isinstance(value, FunctionType) and attribute not in own
            yield _Found(
                name, value, is_attribute=is_data, receiver=receiver if is_method else None
            )


def _list_objects(container: Any) -> Iterator[Any]:
    """The items that are not plain values, such as the functions of a table by name."""
    if len(container) > _MAX_ITEMS:
        return
    for item in container.values() if isinstance(container, dict) else container:
        if isinstance(item, _CONTAINERS):
            yield from _list_objects(item)
        elif not isinstance(item, _DATA):
            yield item


def _list_defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, defaults = function.__code__, function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    yield from zip(code.co_varnames[first : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _unwrap(value: Any) -> Iterator[Any]:
    """What a wrapper of a function calls."""
    if isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield from filter(None, (value.fget, value.fset))
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif not isinstance(value, FunctionType | type) and "__wrapped__" in _get_attributes(value):
        yield value.__wrapped__


def _get_attributes(value: object) -> dict[str, Any]:
    try:
        return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return {}


def _list_attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from _get_attributes(value).items()
    if is_dataclass(value) and not isinstance(value, type) and not _get_attributes(value):
        yield from ((one.name, getattr(value, one.name, None)) for one in fields(value))


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  raises if it is empty
    except ValueError:
        return False
    return True


def _name_function(function: FunctionType, found_as: str) -> str:
    name = _cut_locals(function.__qualname__)
    return found_as if name == "<lambda>" else name


def _cut_locals(qualname: str) -> str:
    return qualname.rpartition("<locals>.")[2]
