"""The bug table: each bug is planted in a tiny real run; which sentinel finds it, and at which step.

`python -m benchmarks.planted_bugs`, from the repository's root.
"""

from __future__ import annotations

import asyncio
import io
import logging
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

from tests.sentinels.bugs_in_batches import IN_BATCHES
from tests.sentinels.bugs_in_learning import IN_LEARNING
from tests.sentinels.bugs_in_tokens import IN_TOKENS
from tests.sentinels.bugs_in_weights import IN_WEIGHTS
from tests.sentinels.planted import Bug, run_with


def main() -> None:
    logging.disable(logging.WARNING)
    bugs = (*IN_TOKENS, *IN_BATCHES, *IN_LEARNING, *IN_WEIGHTS)
    found: Counter[bool] = Counter()
    print("| bug | known from | sentinel | planted at | found at | also found by |")
    print("|---|---|---|---|---|---|")
    for bug in bugs:
        planted_at, found_at, others = _outcome(bug)
        found[found_at is not None] += 1
        cells = (
            bug.name,
            bug.source,
            f"`{bug.sentinel}`",
            str(planted_at),
            str(found_at or "never"),
        )
        print(f"| {' | '.join((*cells, ', '.join(others)))} |")
    print(f"\n{found[True]} of {len(bugs)} found.")


def _outcome(bug: Bug) -> tuple[int, int | None, list[str]]:
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        planted_at, findings = asyncio.run(run_with(bug, Path(folder)))
    steps = [finding.step for finding in findings if finding.sentinel == bug.sentinel]
    others = sorted({finding.sentinel for finding in findings} - {bug.sentinel})
    return planted_at, min(steps, default=None), others


if __name__ == "__main__":
    main()
