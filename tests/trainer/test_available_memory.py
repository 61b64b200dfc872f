"""The tightest limit on memory counts: of the machine, a control group or a resource limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyfleet.trainer.available_memory import GIB, format_gib, read_cpu_memory

MACHINE = {
    "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 20971520 kB\n",
    "proc/self/status": "VmRSS: 1048576 kB\n",
}
V1 = "sys/fs/cgroup/memory"
UNLIMITED = "9223372036854771712"


def folder(root: Path, files: dict[str, str]) -> Path:
    for name, text in {**MACHINE, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "gib", "source"),
    [
        # 20 GiB are free, and the process holds 1 already.
        ({}, 21, "machine"),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 21, "machine"),
        # Others in the group hold 3 of its 8 GiB: 5 in use, less 1 of cached files and 1 of ours.
        (
            {
                "proc/self/cgroup": "0::/job/one\n",
                "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
                "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {GIB}\n",
                "sys/fs/cgroup/job/one/memory.max": "max\n",
            },
            5,
            "cgroup's limit of 8.0 GiB",
        ),
        # Cached files count as free however recently they were read; shared memory does not.
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{12 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{11 * GIB}\n",
                "sys/fs/cgroup/memory.stat": f"file {8 * GIB}\nshmem {2 * GIB}\n"
                f"inactive_file {GIB}\nactive_file {5 * GIB}\nslab_reclaimable {GIB}\n",
            },
            9,
            "cgroup's limit of 12.0 GiB",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                f"{V1}/memory.limit_in_bytes": f"{8 * GIB}\n",
                f"{V1}/memory.usage_in_bytes": f"{7 * GIB}\n",
                f"{V1}/memory.stat": f"active_file 1\ntotal_active_file {4 * GIB}\n"
                f"total_inactive_file {GIB}\n",
            },
            7,
            "cgroup's limit of 8.0 GiB",
        ),
        # A container sees the host's path, and its own group at the mount.
        (
            {
                "proc/self/cgroup": "9:cpu:/\n4:memory:/docker/0123\n",
                f"{V1}/memory.limit_in_bytes": f"{2 * GIB}\n",
                f"{V1}/memory.usage_in_bytes": f"{GIB}\n",
            },
            2,
            "cgroup's limit of 2.0 GiB",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n",
                f"{V1}/a/memory.limit_in_bytes": f"{UNLIMITED}\n",
            },
            21,
            "machine",
        ),
    ],
)
def test_the_tightest_limit_counts(
    tmp_path: Path, files: dict[str, str], gib: int, source: str
) -> None:
    available = read_cpu_memory(folder(tmp_path, files))
    assert available is not None
    assert (available.n_bytes, available.held_bytes) == (gib * GIB, GIB)
    assert source in available.source


def test_nothing_is_known_without_proc(tmp_path: Path) -> None:
    assert read_cpu_memory(tmp_path) is None


def test_a_resource_limit_counts() -> None:
    script = (
        "import resource; from skyfleet.trainer.available_memory import read_cpu_memory\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))\n"
        "available = read_cpu_memory(); print(available.n_bytes < 2**30 + 2**28, available.source)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "True RLIMIT_DATA=1.0 GiB\n", done.stderr


def test_sizes_are_written_in_binary_units() -> None:
    assert [format_gib(n) for n in (8 * GIB, 50 * 2**20)] == ["8.0 GiB", "50 MiB"]
