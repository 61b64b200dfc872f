"""Sources of tasks that are generated or come from a package, not from a file."""

from __future__ import annotations

GENERATED_PREFIXES = ("world:", "agentdojo:", "tau_bench:", "tau2:", "bfcl:")


def is_file(source: str) -> bool:
    """Whether the source is the address of a task file."""
    return not source.startswith(GENERATED_PREFIXES)
