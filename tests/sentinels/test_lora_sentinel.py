"""Adapters that are not merged into the weights are found after a sync."""

from __future__ import annotations

import pytest
from tests.engines.test_embedded_engine import engine
from tests.fakes.samples import random_groups
from tests.learner.test_lora_learner import FAST, adapted
from tests.learner.test_single_device_learner import learner, on_policy

from skyfleet.learner import single_device
from skyfleet.sentinels.stages import SyncStage
from skyfleet.sentinels.sync_checks import engine_weights


@pytest.mark.parametrize("forgets", [False, True])
async def test_adapters_that_are_not_merged_are_found(
    monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    if forgets:
        monkeypatch.setattr(single_device, "merge", lambda module: None)
    decoder = adapted()
    student = learner(decoder, FAST)
    await student.step(on_policy(decoder, random_groups(2)))
    stage = SyncStage(version=1, previous=0, learner=student, engines=[engine(decoder)])
    finding = engine_weights(stage)
    if not forgets:
        assert finding is None
        return
    assert finding is not None
    assert "adapters are not merged" in finding.sentence
    assert finding.evidence["layers"] == 14  # two layers of seven projections
