"""What a sharded learner asks of its ranks, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.samples import random_groups

from skyfleet.errors import LearnerLostError
from skyfleet.learner.learner import StepReport
from skyfleet.learner.rank_worker import RankReport
from skyfleet.learner.sharded import ShardedLearner


class FakeGroup:
    world_size = 2

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, *arguments))
        if method == "load":
            return 7
        if method == "step":
            if self.error is not None:
                raise self.error
            version = arguments[1] + 1
            return RankReport(report=StepReport(policy_version=version, metrics={"n": 1.0}))
        return None

    def iterate(self, method: str) -> Iterator[Any]:
        yield method

    def close(self) -> None: ...


async def test_the_reference_is_named_before_a_step_and_before_a_checkpoint_is_loaded(
    tmp_path: Path,
) -> None:
    group = FakeGroup()
    steps = [tmp_path / "first", tmp_path / "first", tmp_path / "renewed"]
    folders = iter(steps)
    learner = ShardedLearner(group, reference_folder=lambda: next(folders))
    learner.load(tmp_path)
    assert learner.policy_version == 7
    samples = random_groups(1)
    for _ in range(2):
        report = await learner.step(samples)
    learner.renew_reference()
    await learner.step(samples)
    assert [call[:2] for call in group.calls] == [
        ("set_reference", steps[0]),
        ("load", tmp_path),
        ("set_reference", steps[1]),
        ("step", samples),
        ("step", samples),
        ("set_reference", steps[2]),
        ("step", samples),
    ]
    assert (report.policy_version, learner.policy_version) == (9, 10)
    assert not learner.is_within_update


async def test_after_a_lost_rank_the_weights_count_as_changed() -> None:
    group = FakeGroup()
    learner = ShardedLearner(group)
    group.error = LearnerLostError("rank 1 of the learner died")
    with pytest.raises(LearnerLostError):
        await learner.step(random_groups(1))
    assert learner.is_within_update
