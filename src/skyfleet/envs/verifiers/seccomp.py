"""A seccomp filter that restricts this process to computing.

Every system call outside `ALLOWED` fails with EPERM. The filter cannot be removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

SUPPORTED = platform.system() == "Linux" and platform.machine() == "x86_64"
"""System call numbers differ between architectures; only x86_64 has a table here."""

ALLOWED = {
    "read": 0,
    "write": 1,
    "close": 3,
    "fstat": 5,
    "lseek": 8,
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "mremap": 25,
    "madvise": 28,
    "getpid": 39,
    "exit": 60,
    "sigaltstack": 131,
    "gettid": 186,
    "futex": 202,
    "clock_gettime": 228,
    "clock_nanosleep": 230,
    "exit_group": 231,
    "getrandom": 318,
}
"""x86_64. None of these opens a file, connects, starts a process or sends a signal."""

# linux/bpf_common.h, linux/seccomp.h, linux/audit.h, linux/prctl.h
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET = 0, 4
_ARCH_X86_64 = 0xC000003E
_ALLOW, _REFUSE, _KILL_PROCESS = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter() -> None:
    """Allow only `ALLOWED` from now on, for this process and its children; OSError if refused."""
    if not SUPPORTED:
        raise OSError(errno.ENOSYS, f"no filter for {platform.system()} on {platform.machine()}")
    instructions = _write_program()
    program = _Program(len(instructions) // 8, instructions)
    control_process(_PR_SET_NO_NEW_PRIVS, 1)
    control_process(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def control_process(option: int, *values: int) -> None:
    """Call prctl(2)."""
    arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _write_program() -> bytes:
    numbers = sorted(ALLOWED.values())
    checks = [
        # The jump distance to the last instruction, over the remaining checks and the refusal.
        _instruction(_JUMP_IF_EQUAL, number, if_true=len(numbers) - position)
        for position, number in enumerate(numbers)
    ]
    program = [
        _instruction(_LOAD_WORD, _ARCH_OFFSET),
        _instruction(_JUMP_IF_EQUAL, _ARCH_X86_64, if_true=1),
        # The 32-bit entry point numbers its calls differently, so the checks below would not fit.
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD_WORD, _NUMBER_OFFSET),
        *checks,
        _instruction(_RETURN, _REFUSE),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _instruction(code: int, value: int, *, if_true: int = 0) -> bytes:
    """Pack a struct sock_filter: code, jump if true, jump if false, value."""
    return struct.pack("=HBBI", code, if_true, 0, value)
