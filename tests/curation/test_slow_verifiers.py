"""Slow verifiers are quarantined alone, and a verdict by time-out does not outlive its cause."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.curation.planted_faults import good_tasks

from skyfleet.config.environment import Verifier
from skyfleet.curation.inspection import open_inspectable
from skyfleet.curation.quarantine import Quarantine
from skyfleet.curation.validate import validate
from skyfleet.curation.verdict import Reason, Verdict, open_journal

SLEEPS = "import time\ndef verify(env): time.sleep(600)"
SPINS = "def verify(env):\n    while True: pass"


@pytest.mark.parametrize(
    "endless", [SLEEPS, pytest.param(SPINS, marks=pytest.mark.exhaustive)], ids=["sleeps", "spins"]
)
async def test_of_eight_endless_and_24_good_tasks_exactly_the_eight_are_quarantined(
    tmp_path: Path, endless: str
) -> None:
    """Each episode has less time than the endless ones of one worker take together."""
    tasks = [
        task.model_copy(
            update={
                "verifier_code": f"{endless} # {index}"
                if index % 4 == 0
                else f"{task.verifier_code}# from a file"
            }
        )
        for index, task in enumerate(good_tasks(github=32))
    ]
    open_env = partial(open_inspectable, verifier=Verifier(timeout_seconds=2.5))
    with open_journal(tmp_path / "journal", {}) as journal:
        verdicts = await validate({"a": tasks}, open_env, journal=journal, timeout_seconds=9)
    faults = {index: verdict for index, verdict in enumerate(verdicts) if not verdict.ok}
    assert list(faults) == list(range(0, 32, 4))
    assert all("ran longer than 2.5 s" in verdict.evidence for verdict in faults.values())


@pytest.mark.parametrize("reason", Reason)
async def test_resume_checks_again_what_may_have_been_a_time_out_or_an_outage(
    tmp_path: Path, reason: Reason
) -> None:
    (task,) = good_tasks(github=1)
    kept = Verdict.on(task, (reason, "the verifier ran longer than 30 s"))
    with open_journal(tmp_path / "journal", {}) as journal:
        journal.add(kept)
    with open_journal(tmp_path / "journal", {}, resume=True) as journal:
        (verdict,) = await validate({"a": [task]}, open_inspectable, journal=journal)
    again = reason in (Reason.UNGRADED, Reason.ENV_FAILS, Reason.FLAKY)
    assert (verdict.reason is None, verdict == kept) == (again, not again)
    assert len(Quarantine().updated([kept]).updated([verdict]).rows) == (not again and not kept.ok)
    with open_journal(tmp_path / "journal", {}, resume=True) as journal:
        assert journal.find(task) == verdict
