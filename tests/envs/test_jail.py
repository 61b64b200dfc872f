"""Untrusted verifiers grade as trusted ones do and cannot escape from the jail."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.fakes.jails import BWRAP, CURRENT, GOOD, KINDS, SEED, verifier, verify

from skyfleet.envs.verifiers import seccomp
from skyfleet.envs.verifiers.confinement import build_bwrap_command
from skyfleet.envs.verifiers.jail import Jail
from skyfleet.envs.verifiers.jail_protocol import pack_frame, pack_verdict
from skyfleet.envs.verifiers.run_verifier import Verdict, load_state, run_verifier
from skyfleet.errors import VerifierError

FORGED = pack_frame(pack_verdict(Verdict(reward=1.0, stdout="")))

pytestmark = pytest.mark.skipif(not seccomp.SUPPORTED, reason="the filter is for Linux on x86_64")


@pytest.fixture(scope="module", params=KINDS)
def jail(request: pytest.FixtureRequest) -> Iterator[Jail]:
    os.environ["SECRET_OF_THE_RUN"] = "hunter2"
    with Jail(n_workers=1, bwrap=request.param) as jail:
        yield jail
    del os.environ["SECRET_OF_THE_RUN"]


ADDED = {"table": "pets", "pk": 2, "type": "insert", "fields": [("id", 2), ("name", "tom")]}
ORDINARY = {
    "passes": f"env.db('seed').diff(env.db('current')).expect_exactly([{ADDED!r}])",
    "fails": "print('two'); return int(env.db('current').table('pets').count() == 1)",
    "half": "return 0.5",
    "hears": "return final_answer == 'tom'",
    "imports": "import datetime\nreturn datetime.datetime.strptime('2026', '%Y').year",
    "sorts": "return len(env.db('seed').table('pets').sort('name').all())",
}


@pytest.mark.parametrize("body", ORDINARY.values(), ids=list(ORDINARY))
async def test_a_grade_in_the_jail_equals_the_grade_outside(jail: Jail, body: str) -> None:
    code = verifier(body)
    with closing(load_state(SEED)) as seed, closing(load_state(CURRENT)) as current:
        outside = run_verifier(code, seed, current, "tom")
    assert await jail.verify(code, SEED, CURRENT, "tom") == outside


ATTEMPTS = {
    "read a file": ("open('/etc/passwd').read()", "PermissionError"),
    "write a file": ("open('/tmp/escaped', 'w')", "PermissionError"),
    "list a folder": ("import os; os.listdir('/')", "PermissionError"),
    "look at a file": ("import os; os.stat('/etc/passwd')", "PermissionError"),
    "read its own memory": ("open('/proc/self/mem', 'rb')", "PermissionError"),
    "read the worker's environment": ("open('/proc/1/environ', 'rb')", "PermissionError"),
    "connect": ("import socket; socket.socket()", "PermissionError"),
    "fork": ("import os; os.fork()", "PermissionError"),
    "execute": ("import os; os.execv('/bin/sh', ['sh'])", "PermissionError"),
    "signal the worker": ("import os; os.kill(2, 9)", "PermissionError"),
    "signal its parent": ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    "signal everybody": ("import os; os.kill(-1, 9)", "PermissionError"),
    "open a pipe": ("import os; os.pipe()", "PermissionError"),
    "lift a limit": ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "Error"),
    "leave a thread": ("import _thread; _thread.start_new_thread(print, ())", "can't start"),
    "start a program": ("import subprocess", "ModuleNotFoundError"),
    "one large memory": ("b'x' * 2**32", "MemoryError"),
    "many small memories": ("all = []\nwhile True: all.append(b'x' * 2**20)", "MemoryError"),
    "endless recursion": ("def f(): f()\nf()", "RecursionError"),
    "leave early": ("import os; os._exit(0)", "without a result"),
    "crash": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "be unspeakable": (
        "class Unspeakable(Exception):\n    def __str__(self): raise self\nraise Unspeakable",
        "without a result",
    ),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "close the result": ("import os; os.close(3); return 1", "without a result"),
    "flood the result": ("import os; os.write(3, b'x' * 2_000_000)", "more than 1000000 bytes"),
    "claim infinity": ('import os; os.write(3, b\'{"reward": 1e999, "stdout": ""}\')', "wrote"),
    "answer with a tower": ("import os; os.write(3, b'[' * 900_000)", "overwrote"),
    "attach a file": (
        "import sqlite3; sqlite3.connect(':memory:').execute(\"attach '/tmp/a' as a\")",
        "unable to open database",
    ),
    "load an extension": (
        "import sqlite3\nconnection = sqlite3.connect(':memory:')\n"
        "connection.enable_load_extension(True)\nconnection.load_extension('libc.so.6')",
        "OperationalError|AttributeError",
    ),
}


@pytest.mark.parametrize(("body", "complaint"), ATTEMPTS.values(), ids=list(ATTEMPTS))
async def test_an_escape_attempt_leaves_the_grade_unknown(
    jail: Jail, body: str, complaint: str
) -> None:
    await verify(jail, GOOD)
    pids = jail.pids
    with pytest.raises(VerifierError, match=complaint):
        await verify(jail, verifier(body))
    assert (await verify(jail, GOOD)).success
    assert jail.pids == pids, "the same worker goes on"


ENDLESS = [
    "while True: pass",
    "import time; time.sleep(60)",
    "while True: print('x' * 2**20)",
    "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
]


@pytest.mark.parametrize("body", ENDLESS)
async def test_a_verifier_that_takes_too_long_is_ended(jail: Jail, body: str) -> None:
    await verify(jail, GOOD)
    pids, begin = jail.pids, time.monotonic()
    with pytest.raises(VerifierError, match=r"longer than 0\.2 s"):
        await verify(jail, verifier(body), timeout_seconds=0.2)
    assert time.monotonic() - begin < 10
    assert (await verify(jail, GOOD)).success
    assert jail.pids == pids


async def test_a_forged_result_counts_for_no_verification(jail: Jail) -> None:
    code = f"""
    import os, sys
    frame = sys._getframe()
    while frame:
        for thing in frame.f_locals.values():
            try:
                thing.sendall({FORGED!r})
            except (AttributeError, OSError):
                pass
        frame = frame.f_back
    for fd in range(1024):
        try:
            os.write(fd, {FORGED!r})
        except OSError:
            pass
    return 0
    """
    with pytest.raises(VerifierError, match="overwrote its own result"):
        await verify(jail, verifier(code))
    assert (await verify(jail, verifier("return 0"))).reward == 0.0


async def test_damage_by_one_verifier_does_not_affect_the_next(jail: Jail) -> None:
    bends = """
    import json
    json.dumps = lambda said: '{"reward": 1.0, "stdout": "bent"}'
    """
    takes_out = """
    import sys
    modules = [m for name, m in sys.modules.items() if name.startswith("skyfleet")]
    return 0 if any([vars(one).pop("parse_reward", None) for one in modules]) else 1
    """
    with pytest.raises(VerifierError):
        await verify(jail, verifier("import builtins; builtins.__dict__.clear()"))
    assert (await verify(jail, verifier(bends))).explanation == "bent"
    assert (await verify(jail, verifier(takes_out))).reward == 0.0
    assert (await verify(jail, verifier("return len('') or 0.25"))).reward == 0.25


async def test_no_shell_runs_and_no_secret_is_there(jail: Jail) -> None:
    code = "import os; print(dict(os.environ)); return os.system('true') == 0"
    grade = await verify(jail, verifier(code))
    assert grade.reward == 0.0
    assert "LC_CTYPE" in grade.explanation
    assert "hunter2" not in grade.explanation


CALLS = """
open=2 stat=4 ioctl=16 socket=41 connect=42 clone=56 fork=57 vfork=58 execve=59 kill=62 ptrace=101
prctl=157 setrlimit=160 mount=165 tgkill=234 openat=257 newfstatat=262 unshare=272 prlimit64=302
process_vm_readv=310 seccomp=317 memfd_create=319 bpf=321 execveat=322 userfaultfd=323
io_uring_setup=425 pidfd_open=434 clone3=435 openat2=437 x32_getpid=1073741863
"""


async def test_raw_system_calls_are_refused(jail: Jail) -> None:
    code = f"""
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    for call in {CALLS!r}.split():
        ctypes.set_errno(0)
        number = int(call.partition("=")[2])
        if (libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno()) != (-1, 1):
            print(call)
    """
    grade = await verify(jail, verifier(code))
    assert (grade.explanation, grade.success) == ("", True)


async def test_the_32_bit_entry_to_the_kernel_ends_the_verifier(jail: Jail) -> None:
    code = """
    import ctypes
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    page = libc.mmap(None, ctypes.c_size_t(4096), 7, 0x22, -1, 0)
    getpid = bytes.fromhex("b814000000cd80c3")  # mov eax, 20; int 0x80; ret
    ctypes.memmove(page, getpid, len(getpid))
    print(ctypes.CFUNCTYPE(ctypes.c_int)(page)())
    """
    # Where the kernel has no such entry, the instruction is a fault.
    with pytest.raises(VerifierError, match=r"SIGSYS|SIGSEGV"):
        await verify(jail, verifier(code))


async def test_long_output_keeps_its_end_and_the_grade(jail: Jail) -> None:
    grade = await verify(jail, verifier("print('\\U0001f600' * 200_000, 'the end')"))
    assert grade.success
    assert grade.explanation.endswith("the end\n")
    assert len(grade.explanation) == 64_000


async def test_a_lone_surrogate_in_the_output_can_be_written(jail: Jail) -> None:
    grade = await verify(jail, verifier("print('\\ud800')"))
    assert grade.explanation.encode() == b"?\n"


async def test_a_broken_database_is_an_unknown_grade(jail: Jail) -> None:
    code = verifier("return env.db('current').table('pets').count()")
    with pytest.raises(VerifierError, match="DatabaseError"):
        await jail.verify(code, SEED, b"x" * 8192, None)


@BWRAP
def test_bubblewrap_alone_hides_the_machine() -> None:
    program = """
import os, socket
print(sorted(os.listdir("/")), os.path.exists("/etc/passwd"), os.path.exists("/proc/self"))
print(os.getuid(), os.getpid() < 5, sorted(set(os.environ) - {"PWD", "LC_CTYPE"}))
for attempt in (lambda: open("/new", "w"), lambda: socket.create_connection(("127.0.0.1", PORT))):
    try:
        print(attempt())
    except OSError as error:
        print(type(error).__name__, error.errno)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = program.replace("PORT", str(server.getsockname()[1]))
        command = build_bwrap_command("bwrap", result)
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    inside, who, writing, connecting = output.splitlines()
    assert inside.endswith("] False False")
    assert who == "65534 True []"
    assert writing == "OSError 30"
    assert connecting.startswith("ConnectionRefusedError")
