"""Turn out-of-memory errors of torch and Python into one sentence with the settings to lower."""

from __future__ import annotations

import re
from traceback import clear_frames

import torch

from skyfleet.errors import OutOfMemoryError

_MESSAGE = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)
_ASKED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_MESSAGE.search(str(error)))


def describe_out_of_memory(error: BaseException, during: str, remedy: str, plan: str = "") -> str:
    """`plan` is the memory that the run was planned with, if known."""
    asked = _ASKED.search(str(error))
    amount = f" (it tried to allocate {asked[1]})" if asked else ""
    planned = f"; {plan}" if plan else ""
    return f"{during} ran out of memory{amount}{planned}; {remedy}"


class _ExplainOutOfMemory:
    # A class, because a generator-based context manager takes longer per decoding step.
    def __init__(self, during: str, remedy: str, plan: str) -> None:
        self._during, self._remedy, self._plan = during, remedy, plan

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            return
        sentence = describe_out_of_memory(error, self._during, self._remedy, self._plan)
        # The frames of the error hold the tensors that filled the memory.
        clear_frames(error.__traceback__)
        raise OutOfMemoryError(sentence) from None


def explain_out_of_memory(during: str, remedy: str, plan: str = "") -> _ExplainOutOfMemory:
    """Raise OutOfMemoryError for an allocation that failed inside."""
    return _ExplainOutOfMemory(during, remedy, plan)
