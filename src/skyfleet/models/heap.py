"""Return memory that glibc keeps after an update to the system.

Tensors of up to 32 MiB come from glibc's heap. When an update frees its activations, the heap keeps
them: 3 GiB with SmolLM2-135M. The KV cache that grows next could not use that memory.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

MIN_BYTES = 2**28
"""Less is not worth the page faults of the next update."""


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    ]


@cache
def _glibc() -> Any:
    """None with another C library, or a glibc before 2.33."""
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _MallInfo2
        library.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError, TypeError):
        return None
    return library


def count_free_heap() -> int:
    """Bytes that the heap keeps without a use; 0 if unknown."""
    library = _glibc()
    return int(library.mallinfo2().fordblks) if library is not None else 0


def return_free_heap() -> None:
    """Return unused heap to the system if it is a substantial amount."""
    if count_free_heap() > MIN_BYTES:
        _glibc().malloc_trim(0)
