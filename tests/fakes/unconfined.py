"""Run a command on a machine without a sandbox: the kernel refuses filters and namespaces.

`python -m tests.fakes.unconfined COMMAND ...` installs a filter that fails the system calls which
bubblewrap and the verifiers' filter need, as a container without these rights does, and runs the
command under it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_CALL, _FIRST_ARGUMENT = 0, 16
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_CLONE, _PRCTL, _UNSHARE, _SECCOMP, _CLONE3 = 56, 157, 272, 317, 435
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_NEW_NAMESPACES = 0x7E020000

# (operation, value, next line if true, next line if false)
_PROGRAM = [
    (_LOAD, _CALL, 1, 1),
    (_IF_EQUAL, _SECCOMP, 11, 2),
    (_IF_EQUAL, _UNSHARE, 11, 3),
    (_IF_EQUAL, _CLONE3, 12, 4),
    (_IF_EQUAL, _CLONE, 8, 5),
    (_IF_EQUAL, _PRCTL, 6, 10),
    (_LOAD, _FIRST_ARGUMENT, 7, 7),
    (_IF_EQUAL, _PR_SET_SECCOMP, 11, 10),
    (_LOAD, _FIRST_ARGUMENT, 9, 9),
    (_IF_ANY_BIT, _NEW_NAMESPACES, 11, 10),
    (_RETURN, _ALLOW, 11, 11),
    (_RETURN, _FAIL | errno.EPERM, 12, 12),
    (_RETURN, _FAIL | errno.ENOSYS, 13, 13),  # glibc then uses clone
]


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_sandboxes() -> None:
    """From now on, prctl(PR_SET_SECCOMP), seccomp and new namespaces fail with EPERM."""
    packed = b"".join(
        struct.pack("=HBBI", operation, yes - line - 1, no - line - 1, value)
        for line, (operation, value, yes, no) in enumerate(_PROGRAM)
    )
    program = _Filter(len(_PROGRAM), packed)
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, pointer in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0),
        (_PR_SET_SECCOMP, 2, ctypes.addressof(program)),
    ):
        words = [ctypes.c_ulong(word) for word in (value, pointer, 0, 0)]
        if libc.prctl(option, *words) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    refuse_sandboxes()
    os.execvp(sys.argv[1], sys.argv[1:])
