"""Record every system call of a run that changes files, and rebuild the disk after any of them.

Three disks for each prefix of the calls: everything arrived; file data that was not synced is lost;
and so are names (created, renamed, removed) whose folder was not synced since.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Literal

Loss = Literal["nothing", "data", "data and names"]
LOSSES: tuple[Loss, ...] = ("nothing", "data", "data and names")
_CALLS = (
    "openat,open,creat,write,pwrite64,writev,lseek,ftruncate,truncate,rename,renameat,renameat2,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir,fsync,fdatasync,close,clone,clone3,fork,vfork"
)
_LINE = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)(?:<.*>)?(?: .*)?$")


@dataclass(eq=False)
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    entries: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    name: str
    args: tuple[str, ...]
    result: int


def record(command: Sequence[str], trace: Path, *, cwd: Path) -> None:
    """Run a command under strace."""
    strace = [
        "strace",
        "-f",
        "-qq",
        "-xx",
        "-s",
        "9999999",
        "-e",
        f"trace={_CALLS}",
        "-o",
        str(trace),
    ]
    subprocess.run([*strace, *command], check=True, cwd=cwd, capture_output=True)


class Disk:
    """The files below one folder, as calls change them."""

    def __init__(self, root: Path) -> None:
        self._root, self.top = root, Folder()
        self._open: dict[int, tuple[File | Folder, int, bool]] = {}
        """By descriptor: the file, the position and whether it appends."""

    def apply(self, call: Call) -> bool:
        """Whether the call changed or synced something below the root."""
        if call.result < 0:
            return False
        handler = getattr(self, f"_{call.name.removesuffix('64')}", None)
        return bool(handler and handler(call.args, call.result))

    def write_to(self, target: Path, loss: Loss) -> str:
        """Build the disk after a power failure; returns its hash."""
        digest = sha256()
        self._build(self.top, target, loss, digest)
        return digest.hexdigest()

    def _build(self, folder: Folder, target: Path, loss: Loss, digest: object) -> None:
        target.mkdir(exist_ok=True)
        entries = folder.synced if loss == "data and names" else folder.entries
        for name, entry in sorted(entries.items()):
            digest.update(f"{name}\0".encode())  # type: ignore[attr-defined]
            if isinstance(entry, Folder):
                self._build(entry, target / name, loss, digest)
            else:
                data = bytes(entry.data) if loss == "nothing" else entry.synced
                (target / name).write_bytes(data)
                digest.update(data + b"\1")  # type: ignore[attr-defined]
        digest.update(b"\2")  # type: ignore[attr-defined]

    def _find(self, path: str) -> tuple[Folder, str] | None:
        """The folder that holds a path, and the name in it; None outside the root."""
        absolute = PurePosixPath(path) if path.startswith("/") else PurePosixPath(self._root, path)
        try:
            parts = absolute.relative_to(self._root).parts
        except ValueError:
            return None
        folder: File | Folder = self.top
        for part in parts[:-1]:
            if not isinstance(folder, Folder) or part not in folder.entries:
                return None
            folder = folder.entries[part]
        if not parts or not isinstance(folder, Folder):
            return None
        return folder, parts[-1]

    def _openat(self, args: Sequence[str], result: int) -> bool:
        path, flags = _text(args[1]).decode(), args[2]
        self._open.pop(result, None)
        if PurePosixPath(path) in (PurePosixPath("."), PurePosixPath(self._root)):
            self._open[result] = (self.top, 0, False)
            return False
        if (found := self._find(path)) is None:
            return False
        folder, name = found
        changed = False
        if name not in folder.entries:
            if "O_CREAT" not in flags:
                return False
            folder.entries[name] = File()
            changed = True
        entry = folder.entries[name]
        if "O_TRUNC" in flags and isinstance(entry, File) and entry.data:
            entry.data.clear()
            changed = True
        self._open[result] = (entry, 0, "O_APPEND" in flags)
        return changed

    def _close(self, args: Sequence[str], result: int) -> bool:
        self._open.pop(int(args[0]), None)
        return False

    def _lseek(self, args: Sequence[str], result: int) -> bool:
        if int(args[0]) in self._open:
            entry, _, appends = self._open[int(args[0])]
            self._open[int(args[0])] = (entry, result, appends)
        return False

    def _write(self, args: Sequence[str], result: int) -> bool:
        if int(args[0]) not in self._open:
            return False
        entry, position, appends = self._open[int(args[0])]
        assert isinstance(entry, File)
        start = len(entry.data) if appends else position
        self._put(entry, start, _text(args[1])[:result])
        self._open[int(args[0])] = (entry, start + result, appends)
        return True

    def _pwrite(self, args: Sequence[str], result: int) -> bool:
        if int(args[0]) not in self._open:
            return False
        entry = self._open[int(args[0])][0]
        assert isinstance(entry, File)
        self._put(entry, int(args[3]), _text(args[1])[:result])
        return True

    def _writev(self, args: Sequence[str], result: int) -> bool:
        parts = re.findall(r'iov_base=("[^"]*")', ", ".join(args[1:]))
        joined = b"".join(map(_text, parts)).hex()
        return self._write([args[0], joined], result)

    def _put(self, entry: File, start: int, data: bytes) -> None:
        entry.data.extend(b"\0" * (start - len(entry.data)))
        entry.data[start : start + len(data)] = data

    def _ftruncate(self, args: Sequence[str], result: int) -> bool:
        if int(args[0]) not in self._open:
            return False
        entry = self._open[int(args[0])][0]
        assert isinstance(entry, File)
        size = int(args[1])
        changed = size != len(entry.data)
        entry.data[size:] = b""
        self._put(entry, size, b"")
        return changed

    def _fsync(self, args: Sequence[str], result: int) -> bool:
        if int(args[0]) not in self._open:
            return False
        entry = self._open[int(args[0])][0]
        if isinstance(entry, File):
            entry.synced = bytes(entry.data)
        else:
            entry.synced = dict(entry.entries)
        return True

    _fdatasync = _fsync

    def _rename(self, args: Sequence[str], result: int) -> bool:
        source, target = (self._find(_text(arg).decode()) for arg in args[:2])
        if source is None or target is None:
            return False
        target[0].entries[target[1]] = source[0].entries.pop(source[1])
        return True

    def _renameat2(self, args: Sequence[str], result: int) -> bool:
        return self._rename((args[1], args[3]), result)

    _renameat = _renameat2

    def _unlink(self, args: Sequence[str], result: int) -> bool:
        found = self._find(_text(args[0]).decode())
        return found is not None and found[0].entries.pop(found[1], None) is not None

    _rmdir = _unlink

    def _unlinkat(self, args: Sequence[str], result: int) -> bool:
        if args[0] == "AT_FDCWD":
            return self._unlink(args[1:], result)
        if int(args[0]) not in self._open:  # shutil.rmtree works relative to an open folder
            return False
        folder = self._open[int(args[0])][0]
        assert isinstance(folder, Folder)
        return folder.entries.pop(_text(args[1]).decode(), None) is not None

    def _mkdir(self, args: Sequence[str], result: int) -> bool:
        if (found := self._find(_text(args[0]).decode())) is None:
            return False
        found[0].entries[found[1]] = Folder()
        return True


def read_calls(trace: Path) -> Iterator[Call]:
    """The calls of a trace in order; a call of one thread that another interrupts is joined."""
    waiting: dict[str, str] = {}
    others: set[str] = set()
    """Processes that the run started, which have descriptors of their own."""
    for raw in trace.read_text().splitlines():
        line = raw
        thread = line.split(" ", 1)[0]
        if thread in others:
            continue
        if line.endswith("<unfinished ...>"):
            waiting[thread] = line.removesuffix("<unfinished ...>")
            continue
        if (resumed := re.match(r"^(\d+) +<\.\.\. \w+ resumed>(.*)$", line)) is not None:
            line = waiting.pop(resumed[1]) + resumed[2]
        if (match := _LINE.match(line)) is not None:
            if match[1] in ("clone", "clone3", "fork", "vfork"):
                if "CLONE_THREAD" not in match[2]:
                    others.add(match[3])
                continue
            yield Call(name=match[1], args=tuple(_split(match[2])), result=int(match[3]))


def _split(text: str) -> list[str]:
    """Arguments; quoted text is hexadecimal, so it holds no comma."""
    return [part.strip() for part in text.split(", ")]


def _text(quoted: str) -> bytes:
    if quoted.endswith("..."):
        raise ValueError("strace cut a string off")
    return bytes.fromhex(quoted.strip('"').replace("\\x", ""))
