"""Steps of `prepare`, on keys whose hashes are worked by hand: see test_splits."""

from __future__ import annotations

from typing import Any

import pytest

from skyfleet.errors import TaskError
from skyfleet.tasks.prepare import (
    PreparedDataset,
    PrepareOptions,
    explain_no_validation,
    fingerprint,
    normalize_words,
    prepare,
)
from skyfleet.tasks.splits import SplitRule
from skyfleet.tasks.task import Task

QUARTER = SplitRule(eval_fraction=0.25, min_eval_tasks=1)


def task(key: str, env_key: str = "e", **fields: Any) -> Task:
    return Task(key=key, env_key=env_key, prompt=fields.pop("prompt", f"do {key}"), **fields)


def numbered(*tasks: Task) -> list[tuple[int, Task]]:
    return list(enumerate(tasks, start=1))


def letters(text: str, env_key: str = "e") -> list[Task]:
    return [task(key, env_key) for key in text]


def keys(tasks: tuple[Task, ...]) -> str:
    return "".join(one.key for one in tasks)


def prepared(*tasks: Task, **options: Any) -> PreparedDataset:
    return prepare(numbered(*tasks), PrepareOptions(**{"split": QUARTER} | options))


def test_a_quarter_is_evaluated_and_the_rest_is_trained_on() -> None:
    result = prepared(*letters("abcdefgh"))
    assert (keys(result.train), keys(result.validation)) == ("bcdefg", "ah")
    assert (result.thresholds, result.dropped) == ({"e": 0.25}, {})


def test_filters_apply_before_max_tasks() -> None:
    rows = [
        task("x", modality="computer_use"),
        task("y", "other"),
        task("z", difficulty=3),
        *(task(key, difficulty=1) for key in "abcdefgh"),
    ]
    result = prepared(*rows, env_filter=("e",), difficulty_filter=(1, 2), max_tasks=8)
    assert (keys(result.train), keys(result.validation)) == ("bcdefg", "ah")
    assert len(prepared(*rows, modality=None).train) > 6


def test_a_repeated_row_is_dropped_and_reported() -> None:
    result = prepared(*letters("abcdefgh"), task("c"))
    assert keys(result.train) == "bcdefg"
    assert result.dropped == {"row 9 (c)": "key again"}


def test_a_key_with_two_contents_is_rejected() -> None:
    with pytest.raises(TaskError, match=r"row 3: key='a' is already row 1 with other content"):
        prepared(task("a"), task("b"), task("a", prompt="another"))


def test_the_same_prompt_on_other_data_is_another_task() -> None:
    again = task("i", prompt="Do:  C!")
    elsewhere = task("j", prompt="do c", data_key="seed-2")
    result = prepared(*letters("abcdefgh"), again, elsewhere)
    assert result.dropped == {"row 9 (i)": "same prompt"}
    assert "j" in keys(result.train) + keys(result.validation)


def test_case_punctuation_and_spaces_do_not_make_another_task() -> None:
    assert normalize_words("Close  issue #4!\n") == "close issue 4"
    assert fingerprint(task("a", prompt="Close #4.")) == fingerprint(task("b", prompt="close 4"))
    assert fingerprint(task("a", prompt="Close #4")) != fingerprint(task("b", prompt="close 5"))
    for other in ({"data_key": "x"}, {"env_variables": {"USER": "x"}}):
        assert fingerprint(task("a", prompt="p", **other)) != fingerprint(task("a", prompt="p"))


def test_quarantined_rows_are_dropped_before_the_split() -> None:
    rows = numbered(*letters("abcdefgh"))
    result = prepare(rows, PrepareOptions(split=QUARTER), in_quarantine=lambda one: one.key == "e")
    # Seven are left: one of them is measured, at 1/7 = 0.1429, below which only a is.
    assert (keys(result.train), keys(result.validation)) == ("bcdfgh", "a")
    assert result.dropped == {"row 5 (e)": "quarantined"}


def test_the_evaluation_cap_takes_four_per_env_and_then_round_robin() -> None:
    held_out = SplitRule(held_out_envs=frozenset({"x", "y"}))
    rows = [*letters("abcdefgh", "x"), *(task(f"y{i}", "y") for i in range(5)), task("t")]
    result = prepared(*rows, split=held_out, max_eval_prompts=10)
    of_x = keys(tuple(one for one in result.validation if one.env_key == "x"))
    assert of_x == "acdfh"  # by hash: a h c d, then f
    assert len(result.validation) == 10
    assert set(result.dropped.values()) == {"evaluation cap"}
    assert sorted(result.dropped) == ["row 2 (b)", "row 5 (e)", "row 7 (g)"]


def test_four_tasks_per_env_stay_even_above_the_cap() -> None:
    held_out = SplitRule(held_out_envs=frozenset({"x"}))
    result = prepared(*letters("abcdefgh", "x"), task("t"), split=held_out, max_eval_prompts=1)
    assert keys(result.validation) == "acdh"


def test_no_env_keeps_more_than_its_share_of_the_original_tasks() -> None:
    held_out = SplitRule(held_out_envs=frozenset({"v"}))
    rows = [
        *letters("abcdefgh", "big"),
        *(task(f"m{i}", "mid") for i in range(4)),
        *(task(f"s{i}", "small") for i in range(3)),
        task("v", "v"),
    ]
    result = prepared(*rows, split=held_out, max_env_ratio=0.4)
    # 15 x 0.4 = 6, which is 46 % of the 13 that are left: the seeds count before the cap.
    assert keys(tuple(one for one in result.train if one.env_key == "big")) == "abcdfh"
    assert len(result.train) == 13
    assert set(result.dropped.values()) == {"share cap"}


def test_a_share_below_one_task_is_rejected() -> None:
    says = r"max_env_ratio=0.1 of 6 training tasks is less than one task; set at least 0.17, or"
    with pytest.raises(TaskError, match=says):
        prepared(*letters("abcdefgh"), max_env_ratio=0.1)
    assert len(prepared(*letters("abcdefgh"), max_env_ratio=0.17).train) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"split": SplitRule(held_out_envs=frozenset("e"))}, r"no task is left to train on"),
        ({"modality": "computer_use"}, r"modality=computer_use.*most rows are 8 x e tool_use None"),
        ({"env_filter": ("f",)}, r"env_filter names 'f', which has no task.*\['e'\]"),
        ({"difficulty_filter": (3,)}, r"no task has .*difficulty_filter=\[3\]"),
    ],
)
def test_a_dataset_without_training_tasks_is_rejected(options: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        prepared(*letters("abcdefgh"), **options)


def test_an_env_too_small_to_evaluate_is_only_trained_on() -> None:
    result = prepared(*letters("abcdefgh"), split=SplitRule())
    assert (keys(result.train), result.validation) == ("abcdefgh", ())
    note = explain_no_validation(result, SplitRule())
    assert "of 8 e tasks --eval-ratio 0.02 selects 0, and an environment needs" in str(note)
    assert explain_no_validation(prepared(*letters("abcdefgh")), QUARTER) is None


def test_rows_that_are_all_dropped_are_not_blamed_on_held_out_envs() -> None:
    rows = list(enumerate([*letters("abcd"), *letters("ab")], start=1))
    with pytest.raises(TaskError, match=r"every row was dropped \(6 quarantined\)") as caught:
        prepare(rows, PrepareOptions(), in_quarantine=lambda _: True)
    assert "held" not in str(caught.value)
    held_out = PrepareOptions(split=SplitRule(held_out_envs=frozenset("e")))
    with pytest.raises(TaskError, match=r"only evaluated on, \['e'\]; held_out=\['e'\]"):
        prepare(rows[:4], held_out)


def test_a_near_duplicate_with_the_same_grading_is_dropped() -> None:
    prompt = (
        "Please move every open ticket of the billing queue to Ana and tell her why it was done"
    )
    again = prompt.replace("Please", "Kindly")
    rows = [task("i", prompt=prompt, verifier_code="v"), task("j", prompt=again, verifier_code="v")]
    result = prepared(*letters("abcdefgh"), *rows)
    assert result.dropped == {"row 10 (j)": "nearly the same prompt"}


@pytest.mark.parametrize("key", ["corrected", "c"])
def test_a_corrected_row_is_not_dropped_as_a_duplicate_of_the_quarantined_one(key: str) -> None:
    bad, corrected = task("c"), task(key, prompt="do c", verifier_code="corrected")
    rows = numbered(*letters("abdefgh"), bad, corrected)
    result = prepare(rows, PrepareOptions(split=QUARTER), in_quarantine=lambda one: one == bad)
    assert result.dropped == {"row 8 (c)": "quarantined"}
    assert corrected in (*result.train, *result.validation)


def test_another_chat_history_or_ground_truth_is_another_task() -> None:
    system, user = {"role": "system", "content": "policy"}, {"role": "user", "content": "hi"}
    plain = task("a", prompt="hi")
    chat = task("b", prompt="hi", messages=(system, user))
    first, second, third = (
        task(key, prompt="hi", metadata={"reward_spec": {"truth": truth}, "extra_info": info})
        for key, truth, info in [("c", 1, {"index": 1}), ("d", 2, {"index": 2}), ("e", 2, {})]
    )
    assert len({fingerprint(one) for one in (plain, chat, first, second)}) == 4
    assert fingerprint(second) == fingerprint(third), "the position in the file does not matter"
