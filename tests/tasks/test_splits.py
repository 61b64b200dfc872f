"""The train/evaluation split, with hashes worked by hand.

The first eight bytes of MD5 over 2**64: a 0.0498, h 0.1448, c 0.2912, d 0.5096, f 0.5611, b 0.5739,
g 0.6991, e 0.8805.
"""

from __future__ import annotations

import itertools

import pytest

from skyfleet.tasks.splits import SplitRule, hash_fraction, select_subset, split_tasks
from skyfleet.tasks.task import Task

QUARTER = SplitRule(eval_fraction=0.25, min_eval_tasks=1)


def tasks(env_key: str, n: int) -> list[Task]:
    return [Task(key=f"{env_key}-{i}", env_key=env_key, prompt="p") for i in range(n)]


def letters(text: str) -> list[Task]:
    return [Task(key=key, env_key="e", prompt="p") for key in text]


def keys(rows: tuple[Task, ...]) -> str:
    return "".join(sorted(task.key for task in rows))


def test_the_hash_fraction_of_a_key_is_the_beginning_of_its_md5() -> None:
    # md5("a") begins 0cc175b9c0f1b6a8.
    assert hash_fraction("a") == 0x0CC175B9C0F1B6A8 / 2**64
    assert hash_fraction("h") == pytest.approx(0.14479, abs=1e-5)


def test_the_number_of_tasks_of_an_env_decides_its_threshold() -> None:
    eight = split_tasks(letters("abcdefgh"), QUARTER)  # int(8 x 0.25) = 2 of 8: 0.25
    assert (keys(eight.eval), keys(eight.train), eight.thresholds) == ("ah", "bcdefg", {"e": 0.25})
    seven = split_tasks(letters("abcdfgh"), QUARTER)  # int(1.75) = 1 of 7: 0.1429, so h moves
    assert (keys(seven.eval), keys(seven.train)) == ("a", "bcdfgh")


def test_a_fixed_threshold_keeps_every_task_on_its_side() -> None:
    fixed = SplitRule(eval_fraction=0.25, min_eval_tasks=1, thresholds={"e": 0.25})
    assert keys(split_tasks(letters("abcdfgh"), fixed).eval) == "ah"
    assert keys(split_tasks(letters("ha"), fixed).eval) == "ah"


def test_the_split_does_not_depend_on_row_order() -> None:
    assert keys(split_tasks(letters("hgfedcba"), QUARTER).eval) == "ah"


def test_the_split_reproduces_the_published_counts() -> None:
    # int(1089 x 0.02) = 21, int(1865 x 0.02) = 37; int(188 x 0.02) = 3 is too few.
    rows = tasks("booking", 1089) + tasks("github", 1865) + tasks("reddit", 188)
    thresholds = split_tasks(rows, SplitRule()).thresholds
    assert thresholds == {"booking": 21 / 1089, "github": 37 / 1865, "reddit": 0.0}


def test_an_env_with_too_few_evaluation_tasks_is_only_trained_on() -> None:
    # 249 x 0.02 = 4.98 makes 4; 250 x 0.02 makes 5.
    assert split_tasks(tasks("reddit", 249), SplitRule()).thresholds == {"reddit": 0.0}
    assert split_tasks(tasks("reddit", 250), SplitRule()).thresholds == {"reddit": 0.02}


def test_a_cap_limits_the_evaluation_tasks_of_each_env_and_is_off_by_default() -> None:
    rows = tasks("booking", 1089) + tasks("github", 1865) + tasks("reddit", 188)
    rule = SplitRule(max_eval_tasks=20, held_out_envs=frozenset({"reddit"}))
    thresholds = split_tasks(rows, rule).thresholds
    assert thresholds == {"booking": 20 / 1089, "github": 20 / 1865, "reddit": 1.0}
    too_few = SplitRule(max_eval_tasks=4)
    assert set(split_tasks(rows, too_few).thresholds.values()) == {0.0}


def test_a_held_out_env_is_never_trained_on() -> None:
    rule = SplitRule(held_out_envs=frozenset({"outlook"}), thresholds={"outlook": 0.0})
    split = split_tasks(tasks("outlook", 3) + tasks("github", 3), rule)
    assert {task.env_key for task in split.eval} == {"outlook"}
    assert {task.env_key for task in split.train} == {"github"}


@pytest.mark.parametrize("seed", [0, 42])
def test_subsets_of_a_seed_are_nested_and_keep_the_share_of_every_env(seed: int) -> None:
    rows = [*tasks("large", 600), *tasks("small", 60), *tasks("one", 1)]
    sizes = (1, 7, 20, 66, 200, 330, 660, 661)
    chosen = [[task.key for task in select_subset(rows, size, seed=seed)] for size in sizes]
    order = {task.key: number for number, task in enumerate(rows)}
    for size, subset in zip(sizes, chosen, strict=True):
        assert len(set(subset)) == size
        assert sorted(subset, key=order.__getitem__) == subset, "in the order of the rows"
        for env_key, n in (("large", 600), ("small", 60), ("one", 1)):
            share = sum(key.startswith(f"{env_key}-") for key in subset)
            assert abs(share - size * n / 661) <= 1
    for smaller, larger in itertools.pairwise(chosen):
        assert set(smaller) <= set(larger)


def test_another_seed_is_another_subset_and_the_order_of_the_tasks_has_no_effect() -> None:
    rows = tasks("e", 200)
    first = {task.key for task in select_subset(rows, 50, seed=1)}
    assert {task.key for task in select_subset(rows[::-1], 50, seed=1)} == first
    assert 5 < len(first & {task.key for task in select_subset(rows, 50, seed=2)}) < 25
