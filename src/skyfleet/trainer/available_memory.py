"""The memory that this process may use: of the machine, its cgroup, its resource limits, its GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
_CACHED: tuple[str, ...] = ("inactive_file", "active_file", "slab_reclaimable")
"""What the kernel drops before it kills a process. Files in shared memory are not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableMemory:
    n_bytes: int
    """What this process holds already and what it can still get."""
    held_bytes: int
    """What it holds already: Python, torch and everything loaded so far."""
    source: str
    """What limits it, in words."""


def format_gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB / 10 else f"{n_bytes / 2**20:.0f} MiB"


def read_cpu_memory(root: Path = Path("/")) -> AvailableMemory | None:
    """The tightest of all limits; None where nothing is known. `root` is for tests."""
    status = _read_sizes(root / "proc/self/status")
    held = status.get("VmRSS", 0)
    limits = [*_machine(root, held), *_cgroups(root, held)]
    if root == Path("/"):
        limits += _resource_limits(status)
    if not limits:
        return None
    n_bytes, source = min(limits)
    return AvailableMemory(n_bytes=n_bytes, held_bytes=held, source=source)


def read_gpu_memory() -> AvailableMemory:
    """Of the current CUDA device."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    return AvailableMemory(n_bytes=free + held, held_bytes=held, source="the GPU's free memory")


def _machine(root: Path, held: int) -> Iterator[tuple[int, str]]:
    available = _read_sizes(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        yield available + held, "the machine's free memory"
    elif root == Path("/") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine's memory"


def _cgroups(root: Path, held: int) -> Iterator[tuple[int, str]]:
    """The limits of our control group and of all groups around it, in versions 1 and 2."""
    base = root / "sys/fs/cgroup"
    for line in _read_lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            files, cached = ("memory.max", "memory.current"), _CACHED
            mounts = [base, base / "unified"]
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cached = tuple(f"total_{name}" for name in _CACHED)
            mounts = [base / "memory"]
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for mount in mounts:
            # In a container the path may be the host's, and the mount is our own group.
            for end in range(len(parts) + 1):
                yield from _cgroup_limit(mount.joinpath(*parts[:end]), *files, cached, held)


def _cgroup_limit(
    folder: Path, limit_file: str, usage_file: str, cached: Sequence[str], held: int
) -> Iterator[tuple[int, str]]:
    limit, usage = _read_number(folder / limit_file), _read_number(folder / usage_file)
    # Version 1 writes "no limit" as a number near 2**63.
    if limit is None or limit >= 2**60:
        return
    stat = dict(line.split(" ", 1) for line in _read_lines(folder / "memory.stat") if " " in line)
    n_cached = sum(int(stat.get(name, "0")) for name in cached)
    others = max(0, (usage or 0) - n_cached - held)
    yield max(0, limit - others), f"the cgroup's limit of {format_gib(limit)}"


def _resource_limits(status: dict[str, int]) -> Iterator[tuple[int, str]]:
    """Limits of virtual memory: what is left of them, and what the process holds."""
    try:
        import resource
    except ImportError:  # Windows
        return
    held = status.get("VmRSS", 0)
    for name, used in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit, _ = resource.getrlimit(getattr(resource, name))
        if limit != resource.RLIM_INFINITY:
            left = max(0, limit - status.get(used, 0))
            yield left + held, f"{name}={format_gib(limit)}"


def _read_sizes(path: Path) -> dict[str, int]:
    """`Name:   123 kB` lines in bytes."""
    found = (re.match(r"(\w+):\s+(\d+) kB", line) for line in _read_lines(path))
    return {match[1]: int(match[2]) * 1024 for match in found if match}


def _read_number(path: Path) -> int | None:
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
