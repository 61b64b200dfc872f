"""The peak memory of this process, and the record of it beside a plan."""

from __future__ import annotations

import sys
from pathlib import Path

from skyfleet.analysis.run_plan import PLAN, Usage, write_usage


def reset_peak_memory() -> None:
    """Start a new peak, where the device or the kernel can."""
    if _uses_gpu():
        import torch

        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # another system, or not allowed
        return


def read_peak_memory() -> int:
    """Bytes: of the GPU if this process uses one, otherwise of the process."""
    if _uses_gpu():
        import torch

        return int(torch.cuda.max_memory_reserved())
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        import resource

        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak_kib * (1 if sys.platform == "darwin" else 1024)


def _uses_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()


def record_usage(folder: Path, *, from_step: int, to_step: int, seconds: float) -> None:
    """For the comparison with the plan; nothing without one."""
    if (folder / PLAN).is_file():
        write_usage(
            folder,
            Usage(
                from_step=from_step,
                to_step=to_step,
                seconds=seconds,
                peak_memory_bytes=read_peak_memory(),
            ),
        )
