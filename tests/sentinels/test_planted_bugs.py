"""Every bug planted in a real run is found in the step it corrupts, by its sentinel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.sentinels.bugs_in_batches import IN_BATCHES
from tests.sentinels.bugs_in_learning import IN_LEARNING
from tests.sentinels.bugs_in_tokens import IN_TOKENS
from tests.sentinels.bugs_in_weights import IN_WEIGHTS
from tests.sentinels.planted import Bug, run_with

DOCS = Path(__file__).parents[2] / "docs/sentinels.md"
BUGS = (*IN_TOKENS, *IN_BATCHES, *IN_LEARNING, *IN_WEIGHTS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: re.sub(r"\W+", "_", bug.name))
async def test_a_planted_bug_is_found_within_its_step(bug: Bug, tmp_path: Path) -> None:
    planted_at, findings = await run_with(bug, tmp_path)
    assert [finding for finding in findings if finding.step < planted_at] == []
    found = [finding for finding in findings if finding.sentinel == bug.sentinel]
    assert found, sorted({finding.sentinel for finding in findings})
    assert found[0].step == planted_at + bug.shows_later
    assert bug.expected_text in found[0].sentence


def test_at_least_25_bugs_come_from_the_lists_of_skyrl_and_fleet() -> None:
    assert sum(bug.source.startswith(("SkyRL", "Fleet")) for bug in BUGS) >= 25


def test_the_table_in_the_docs_lists_every_bug_with_its_sentinel() -> None:
    lines = DOCS.read_text().partition("| bug | known from")[2].splitlines()[2:]
    rows = [line.split(" | ")[:3] for line in lines if line.startswith("| ")]
    assert rows == [[f"| {bug.name}", bug.source, f"`{bug.sentinel}`"] for bug in BUGS]
