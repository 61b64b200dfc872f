from __future__ import annotations

from skyfleet.tasks.splits import SplitRule, split_tasks
from skyfleet.tasks.task import Task


def tasks(env_key: str, n: int) -> list[Task]:
    return [Task(key=f"{env_key}-{i}", env_key=env_key, prompt="p") for i in range(n)]


def keys(rows: tuple[Task, ...]) -> set[str]:
    return {task.key for task in rows}


def test_a_task_keeps_its_side_when_rows_move_or_more_arrive() -> None:
    rule = SplitRule(eval_fraction=0.2)
    before = split_tasks(tasks("github", 200), rule)
    assert keys(split_tasks(tasks("github", 200)[::-1], rule).eval) == keys(before.eval)
    after = split_tasks(tasks("github", 400) + tasks("booking", 50), rule)
    assert keys(before.eval) <= keys(after.eval)
    assert keys(before.train) <= keys(after.train)


def test_the_side_is_drawn_by_the_md5_of_the_key() -> None:
    # md5("a") is 6497 and md5("b") is 5343 modulo 10000.
    rows = [Task(key=key, env_key="e", prompt="p") for key in "ab"]
    split = split_tasks(rows, SplitRule(eval_fraction=0.6, min_eval_tasks=1))
    assert (keys(split.eval), keys(split.train)) == ({"b"}, {"a"})


def test_about_the_fraction_is_evaluated() -> None:
    split = split_tasks(tasks("github", 1865), SplitRule(eval_fraction=0.02))
    assert len(split.train) + len(split.eval) == 1865
    assert 20 <= len(split.eval) <= 56  # 37.3 expected, three standard deviations of 6.0


def test_an_env_with_too_few_to_tell_trains_on_all() -> None:
    # 188 x 0.02 = 3.76 is below five; 250 x 0.02 = 5 is not.
    assert split_tasks(tasks("reddit", 188), SplitRule()).eval == ()
    assert split_tasks(tasks("reddit", 250), SplitRule()).eval != ()


def test_a_held_out_env_is_never_trained_on() -> None:
    rule = SplitRule(held_out_envs=frozenset({"outlook"}))
    split = split_tasks(tasks("outlook", 3) + tasks("github", 3), rule)
    assert keys(split.eval) == {"outlook-0", "outlook-1", "outlook-2"}
    assert keys(split.train) == {"github-0", "github-1", "github-2"}
