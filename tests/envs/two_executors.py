"""Two executors: one verifier, scored by fleet-python's own and by ours."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

import pytest

from skyfleet.envs.verifiers.run_verifier import run_verifier
from skyfleet.errors import VerifierError
from skyfleet.worlds.database import Database

fleet = pytest.importorskip("fleet.verifiers.local_executor", reason="needs fleet-python")

# fleet-python asks the clock in a way that Python 3.12 warns of.
CLOCK_WARNING = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")

Score = float | None
"""None: the verifier graded nothing."""


def both_scores(
    folder: Path, code: str, seed: bytes, current: bytes, answer: str | None = None
) -> tuple[Score, Score]:
    """Theirs and ours, of two states that are given as images. (None, None) is no agreement."""
    before, after = folder / "seed.db", folder / "current.db"
    before.write_bytes(seed)
    after.write_bytes(current)
    theirs = fleet.execute_verifier_local(code, str(before), str(after), answer)
    ours: Score = None
    with closing(Database(seed)) as a, closing(Database(current)) as b, suppress(VerifierError):
        ours = run_verifier(code, a.connection, b.connection, answer).reward
    return float(theirs["result"]) if theirs["success"] else None, ours
