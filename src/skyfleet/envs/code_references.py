"""What compiled code refers to and changes, and a hash of it that ignores comments and line numbers."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from inspect import CO_NEWLOCALS
from itertools import takewhile
from types import CodeType

from skyfleet.tasks.content_hash import canonicalize, hash_value

_LOADS_VARIABLE = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}
_LOADS_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}
_CHANGES_VARIABLE = {"STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL"}
_CHANGES_ITEM = {"STORE_SUBSCR", "DELETE_SUBSCR"}
_CHANGING_METHODS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "remove", "setdefault", "sort", "update"),
}
_CO_HAS_DOCSTRING = 0x4000000
"""Set from Python 3.14 on, so in 3.13 docstrings count; before, the first constant of a function is its
docstring or None."""


@dataclass(slots=True)
class References:
    names: set[tuple[str, ...]] = field(default_factory=set)
    """Global names with the attributes that are read of them: (graders, grade)."""
    attributes: set[str] = field(default_factory=set)
    """Attributes that are read, of whatever object."""
    imports: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)
    """Modules that the code imports itself, with the attributes that are read of them."""
    changed_variables: set[str] = field(default_factory=set)
    """Global and closure variables that are assigned, or whose items are."""
    changed_attributes: set[str] = field(default_factory=set)
    changed_locals: set[str] = field(default_factory=set)
    """Local variables and arguments whose items are assigned."""


def find_references(code: CodeType) -> References:
    """The references of a function, of the functions and of the classes inside it."""
    found = References()
    for part in _list_codes(code):
        _read(list(dis.get_instructions(part)), found)
    return found


def hash_code(code: CodeType, *, keeps_doc: bool) -> str:
    """Equal for code that does the same in the same way; `keeps_doc` includes its docstring."""
    constants = list(code.co_consts)
    if not keeps_doc and _has_docstring(code):
        constants[0] = None
    n_arguments = code.co_argcount + code.co_kwonlyargcount
    described = [
        [type(one).__name__, hash_code(one, keeps_doc=keeps_doc)]
        if isinstance(one, CodeType)
        else canonicalize([type(one).__name__, one])
        for one in constants
    ]
    return hash_value(
        [
            code.co_code.hex(),
            code.co_exceptiontable.hex(),
            described,
            code.co_names,
            code.co_varnames[:n_arguments],
            code.co_freevars,
            [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags],
        ]
    )


def _has_docstring(code: CodeType) -> bool:
    if sys.version_info >= (3, 13):
        return bool(code.co_flags & _CO_HAS_DOCSTRING)
    # Comprehensions, whose names begin with <, have no place for one.
    is_function = bool(code.co_flags & CO_NEWLOCALS) and not code.co_name.startswith("<")
    return is_function and bool(code.co_consts) and isinstance(code.co_consts[0], str)


def _list_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_codes(constant)


def _read(instructions: Sequence[dis.Instruction], found: References) -> None:
    path: tuple[str, ...] = ()
    for at, instruction in enumerate(instructions):
        name, value = instruction.opname, instruction.argval
        if name in _LOADS_ATTRIBUTE:
            found.attributes.add(value)
            if value in _CHANGING_METHODS:
                _note_change(instructions[at - 1], found)
            path = (*path, value) if path else ()
        else:
            path = (value,) if name in ("LOAD_GLOBAL", "LOAD_NAME") else ()
        if path:
            found.names.add(path)
        if name in _CHANGES_VARIABLE:
            found.changed_variables.add(value)
        elif name in ("STORE_ATTR", "DELETE_ATTR"):
            found.changed_attributes.add(value)
        elif name in _CHANGES_ITEM:
            _note_change(_find_container(instructions, at), found)
        elif name == "IMPORT_NAME":
            found.imports |= set(_read_import(instructions, at))


def _read_import(
    instructions: Sequence[dis.Instruction], at: int
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The module and the attributes that are read of it, for `import` and `from ... import`."""
    level, names = instructions[at - 2].argval, instructions[at - 1].argval
    module = "." * level + instructions[at].argval
    taken: tuple[str, ...] = ()
    for one in instructions[at + 1 :]:
        if one.opname == "IMPORT_FROM":
            taken = (one.argval,)
        elif one.opname.startswith("STORE_"):
            if not names and not taken:  # `import a.b` binds a
                module = module.partition(".")[0]
            for attributes in _list_attributes(instructions, one.argval):
                yield module, (*(taken if names else ()), *attributes)
            if not names:
                return
        elif one.opname not in ("SWAP", "POP_TOP"):
            return


def _list_attributes(
    instructions: Sequence[dis.Instruction], variable: str
) -> Iterator[tuple[str, ...]]:
    """The attributes, such as (b, grade) for `a.b.grade`, that are read of a local variable."""
    for at, one in enumerate(instructions):
        if one.opname.startswith(("LOAD_FAST", "LOAD_NAME")) and one.argval == variable:
            rest = takewhile(lambda one: one.opname in _LOADS_ATTRIBUTE, instructions[at + 1 :])
            yield tuple(one.argval for one in rest)


def _note_change(loading: dis.Instruction | None, found: References) -> None:
    """`loading` pushes the object that is changed."""
    if loading is None:
        return
    if loading.opname in _LOADS_VARIABLE:
        found.changed_variables.add(loading.argval)
    elif loading.opname in _LOADS_ATTRIBUTE:
        found.changed_attributes.add(loading.argval)
    elif loading.opname.startswith("LOAD_FAST"):
        found.changed_locals.add(loading.argval)


def _find_container(instructions: Sequence[dis.Instruction], at: int) -> dis.Instruction | None:
    """What pushes the object of `object[key] = value`, which is below the key on the stack."""
    end = at
    if at >= 2 and instructions[at - 1].opname == instructions[at - 2].opname == "SWAP":
        # object[key] += value copies both, and the copies are what is stored to.
        copies = [n for n in range(1, at) if _are_copies(instructions, n)]
        if not copies:
            return None
        end = copies[-1]
    missing = 1
    for n in range(end - 1, 0, -1):
        one = instructions[n]
        missing -= dis.stack_effect(one.opcode, one.arg, jump=False)
        if missing <= 0:
            return instructions[n - 1]
    return None


def _are_copies(instructions: Sequence[dis.Instruction], at: int) -> bool:
    return at + 1 < len(instructions) and all(
        one.opname == "COPY" and one.arg == 2 for one in instructions[at : at + 2]
    )
