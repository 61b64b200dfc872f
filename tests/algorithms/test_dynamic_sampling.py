"""Dynamic sampling fills a batch with informative groups, or stops the run."""

from __future__ import annotations

from functools import partial

import pytest
from tests.trajectories.making import attempt, group, transcript

from skyfleet.algorithms.advantages import grpo
from skyfleet.algorithms.credit_assignment import assign_credit
from skyfleet.algorithms.filters import (
    check_sample_batches,
    fill_batch,
    merge_by_task,
    penalize_overlong,
    replace_uninformative,
)
from skyfleet.errors import NoLearningSignalError
from skyfleet.learner.batching import mini_batches
from skyfleet.trajectories.trajectory import Group


def good(name: str) -> Group:
    return group([1.0, 0.0], task_key=name)


def flat(name: str) -> Group:
    return group([0.0, 0.0], task_key=name)


def keys(groups: tuple[Group, ...]) -> list[str]:
    return [g.task_key for g in groups]


def test_filter_asks_for_more_until_the_batch_is_full_of_informative_groups() -> None:
    first = [good("a"), flat("b")]
    kept = fill_batch(first, batch_size=2)
    assert kept.wants_more
    kept = fill_batch([*first, good("c"), good("d")], batch_size=2)
    assert not kept.wants_more
    assert keys(kept.groups) == ["a", "c"]
    assert kept.dropped == {"zero_variance": 1, "surplus": 1}


def test_a_task_sampled_twice_in_a_step_is_one_group() -> None:
    merged = merge_by_task([flat("a"), good("b"), group([1.0, 1.0], task_key="a")])
    assert [(g.task_key, g.rewards) for g in merged] == [
        ("a", [0.0, 0.0, 1.0, 1.0]),
        ("b", [1.0, 0.0]),
    ]
    assert keys(fill_batch(merged, batch_size=2).groups) == ["a", "b"]


def test_replace_needs_more_than_min_replace_ratio_informative_groups() -> None:
    batch = [good("a"), flat("b"), flat("c"), flat("d")]
    assert replace_uninformative(batch, batch_size=4, min_replace_ratio=0.25).wants_more
    assert not replace_uninformative(batch, batch_size=4, min_replace_ratio=0.2).wants_more


def test_a_copy_replaces_each_uninformative_group_and_counts_as_a_prompt() -> None:
    """In SkyRL a copy keeps its key, and the run dies when prompts are counted."""
    attempts = [attempt(r, task_key="a", transcripts=(transcript(1),)) for r in (1.0, 0.0)]
    informative = Group(task_key="a", env_key="github", trajectories=tuple(attempts))
    kept = replace_uninformative(
        [informative, flat("b"), flat("c"), flat("d")], batch_size=4, min_replace_ratio=0.0
    )
    assert sorted(keys(kept.groups)) == ["a", "a (copy 1)", "a (copy 2)", "a (copy 3)"]
    assert kept.dropped == {"zero_variance": 3, "copied": 3}
    samples = assign_credit(kept.groups, grpo)
    assert [len(batch) for batch in mini_batches(samples, 2)] == [4, 4]
    assert sorted({round(a, 4) for s in samples for a in s.advantages}) == [-0.7071, 0.0, 0.7071]


def test_every_group_is_copied_once_before_any_is_copied_twice() -> None:
    batch = [good("a"), good("b"), flat("c"), flat("d")]
    kept = replace_uninformative(batch, batch_size=4, min_replace_ratio=0.3)
    copies = {key.split()[0] for key in keys(kept.groups) if "copy" in key}
    assert copies == {"a", "b"}
    again = replace_uninformative(batch, batch_size=4, min_replace_ratio=0.3)
    assert keys(again.groups) == keys(kept.groups)


def test_the_run_stops_after_max_sample_batches_and_never_with_minus_one() -> None:
    wanting, check = (
        fill_batch([flat("a")], batch_size=1),
        partial(check_sample_batches, batch_size=1),
    )
    check(wanting, [flat("a")] * 29, max_sample_batches=30)
    check(wanting, [flat("a")] * 300, max_sample_batches=-1)
    check(fill_batch([good("a")], batch_size=1), [good("a")] * 30, max_sample_batches=30)
    with pytest.raises(NoLearningSignalError, match=r"max_sample_batches=30 .* rewards; raise it"):
        check(wanting, [flat("a")] * 30, max_sample_batches=30)


@pytest.mark.parametrize(
    ("n_sampled", "reward"), [(6, 1.0), (7, 1.0 - 0.5 / 3), (9, 0.5), (10, 0.5), (None, None)]
)
def test_the_reward_falls_over_the_last_tokens_before_the_limit(
    n_sampled: int | None, reward: float | None
) -> None:
    lengths = (3, (n_sampled or 9) - 3)  # both sequences of an attempt count
    long = attempt(
        None if reward is None else 1.0, transcripts=tuple(transcript(n) for n in lengths)
    )
    (penalized,) = penalize_overlong(
        [Group(task_key="t", env_key="github", trajectories=(long,))],
        max_len=9,
        buffer_len=3,
        penalty_factor=0.5,
    )
    (got,) = penalized.trajectories
    assert got.reward == pytest.approx(reward)
    assert got.success == long.success
