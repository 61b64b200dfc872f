"""Owner: the record in a lock file of which process holds it, and whether that process has ended."""

from __future__ import annotations

import os
import socket
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError


class Owner(BaseModel):
    """The content of a lock file: who holds it, or held it until it was killed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    host: str
    boot_id: str
    """Of the kernel: containers of one machine have the same."""
    pid_namespace: str = ""
    """In which `pid` is valid: a container has its own."""
    pid: int
    process_start: str
    """Distinguishes the process from a later one with the same id."""
    since: str
    token: str
    heartbeat: int = 0

    @classmethod
    def describe_this_process(cls) -> Owner:
        return cls(
            host=socket.gethostname(),
            boot_id=_read_boot_id(),
            pid_namespace=_read_pid_namespace(),
            pid=os.getpid(),
            process_start=_read_process_start(os.getpid()),
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            token=uuid4().hex,
        )

    def is_visible(self) -> bool:
        """Whether this process can see the owner's: same kernel, same process ids."""
        here = (_read_boot_id(), _read_pid_namespace())
        return (self.boot_id, self.pid_namespace) == here

    def has_ended(self) -> bool:
        """Whether the owner's process is known to have ended; never of one that is not visible."""
        return self.is_visible() and not _is_running(self.pid, self.process_start)

    def describe(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def read_owner(path: Path) -> Owner | None:
    try:
        return parse_owner(path.read_bytes())
    except OSError:
        return None


def parse_owner(data: bytes) -> Owner | None:
    try:
        return Owner.model_validate_json(data)
    except ValidationError:
        return None


def _is_running(pid: int, process_start: str) -> bool:
    """Whether the process still runs; also where /proc hides the processes of others."""
    if start := _read_process_start(pid):
        return start == process_start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return not Path(f"/proc/{pid}").exists()  # a zombie, which holds no lock


def _read_process_start(pid: int) -> str:
    """Clock ticks from boot to the start of the process; empty without one that still runs."""
    try:
        # The name before it, in brackets, may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _read_pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
