"""Rows in SkyRL's and the tau recipe's format: chat prompts, derived keys, columns as metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyfleet.errors import TaskError
from skyfleet.tasks.loading import drop_long_prompts, load_tasks, write_tasks
from skyfleet.tasks.task import Task

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
GSM8K: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 + 2? Answer after ####."}],
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}
TAU: dict[str, Any] = {
    "data_source": "tau_bench",
    "prompt": json.dumps(CHAT),
    "env_class": "tau_bench",
    "reward_spec": json.dumps({"actions": [{"name": "refund", "kwargs": {"id": 7}}]}),
    "extra_info": json.dumps({"domain": "telecom", "instruction": "You want a refund."}),
}
FLEET = {"key": "k", "env_key": "e", "prompt": "p"}


def load(tmp_path: Path, *rows: dict[str, Any], suffix: str = ".jsonl") -> list[Task]:
    path = tmp_path / f"tasks{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_skyrl_row_keeps_its_class_and_every_column(tmp_path: Path, suffix: str) -> None:
    (task,) = load(tmp_path, GSM8K, suffix=suffix)
    assert (task.env_key, task.env_class) == ("openai/gsm8k", "gsm8k")
    assert (task.prompt, task.messages) == ("2 + 2? Answer after ####.", ())
    assert task.chat == GSM8K["prompt"]
    columns = ("data_source", "reward_spec", "extra_info")
    assert task.metadata == {name: GSM8K[name] for name in columns}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_tau_row_of_json_texts_is_decoded(tmp_path: Path, suffix: str) -> None:
    (task,) = load(tmp_path, TAU, suffix=suffix)
    assert (task.env_key, task.env_class) == ("telecom", "tau_bench")
    assert (task.prompt, task.chat) == ("2 + 2?", CHAT)
    assert task.messages == tuple(CHAT)
    assert task.metadata["reward_spec"] == json.loads(TAU["reward_spec"])
    assert task.metadata["extra_info"]["instruction"] == "You want a refund."
    assert task.metadata["data_source"] == "tau_bench"


def test_a_domain_is_the_environment_of_tau_rows_only(tmp_path: Path) -> None:
    (task,) = load(tmp_path, GSM8K | {"extra_info": {"domain": "algebra"}})
    assert task.env_key == "openai/gsm8k"
    (task,) = load(tmp_path, TAU | {"env_key": "given"})
    assert task.env_key == "given"


def test_without_a_data_source_the_class_is_the_environment(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {"prompt": "p", "env_class": "gsm8k"})
    assert (task.env_key, task.env_class) == ("gsm8k", "gsm8k")


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_written_rows_load_as_the_same_tasks(tmp_path: Path, suffix: str) -> None:
    looks_like_chat = {"prompt": [{"role": "user", "content": json.dumps(CHAT)}], "env_key": "e"}
    tasks = load(tmp_path, GSM8K, TAU, FLEET, looks_like_chat)
    assert tasks[3].prompt == json.dumps(CHAT)
    write_tasks(tmp_path / f"again{suffix}", tasks)
    assert load_tasks(tmp_path / f"again{suffix}") == tasks


def test_a_derived_key_depends_on_the_content_alone(tmp_path: Path) -> None:
    first, second = load(tmp_path, GSM8K, TAU)
    assert [task.key for task in load(tmp_path, TAU, GSM8K)] == [second.key, first.key]
    for row, task in ((GSM8K, first), (TAU, second)):
        assert load(tmp_path, row, suffix=".parquet") == [task]
    other = GSM8K | {"extra_info": {"split": "train", "index": 1, "source": "web"}}
    keys = [task.key for task in load(tmp_path, GSM8K, other)]
    table = load(tmp_path, GSM8K, other, suffix=".parquet")
    assert table[0]["extra_info"] == GSM8K["extra_info"] | {"source": None}
    assert [task.key for task in table] == keys
    reordered = dict(reversed(GSM8K.items()))
    assert load(tmp_path, reordered)[0].key == first.key
    assert load(tmp_path, GSM8K | {"reward_spec": {"ground_truth": "5"}})[0].key != first.key
    # Written down: keys decide the train/evaluation split, so they must never change.
    assert (first.key, second.key) == (
        "openai_gsm8k-3fa52a0b52dc2f72",
        "telecom-47f9bddac5861e2c",
    )


def test_equal_rows_without_a_key_get_different_keys(tmp_path: Path) -> None:
    keys = [task.key for task in load(tmp_path, GSM8K, GSM8K, TAU, GSM8K)]
    assert keys == [keys[0], f"{keys[0]}-2", keys[2], f"{keys[0]}-3"]


def test_given_keys_do_not_change(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        FLEET,
        {"task_key": "l", "env_id": "e", "prompt": "q", "extra": 1},
        GSM8K | {"key": "m"},
    ]
    assert [task.key for task in load(tmp_path, *rows)] == ["k", "l", "m"]


def test_every_other_column_goes_into_metadata(tmp_path: Path) -> None:
    (task,) = load(tmp_path, FLEET | {"answer": 4, "metadata": {"template": "t"}})
    assert task.metadata == {"answer": 4, "template": "t"}
    assert (task["answer"], task["prompt"], task.get("none", 0)) == (4, "p", 0)
    assert "answer" in task
    assert "none" not in task
    with pytest.raises(TaskError, match=r"row 1: answer=4 and metadata.answer=5 differ; keep one"):
        load(tmp_path, FLEET | {"answer": 4, "metadata": {"answer": 5}})


def test_an_answer_as_solution_is_not_a_list_of_calls(tmp_path: Path) -> None:
    for answer in ("42", "[0, 1)", ["x", "y"], 7):
        (task,) = load(tmp_path, FLEET | {"solution": answer})
        assert (task.solution, task["solution"]) == ((), answer)
    (task,) = load(tmp_path, FLEET | {"solution": '[{"name": "f"}]'}, suffix=".parquet")
    assert [call.name for call in task.solution] == ["f"]
    with pytest.raises(TaskError, match=r"row 1: solution='\[\{': not JSON"):
        load(tmp_path, FLEET | {"solution": "[{"})


def test_values_of_a_table_that_json_lacks_are_converted(tmp_path: Path) -> None:
    from datetime import date

    (task,) = load(tmp_path, FLEET | {"day": date(2026, 3, 2), "raw": b"\xff"}, suffix=".parquet")
    assert task.metadata == {"day": "2026-03-02", "raw": "_w=="}


def test_a_dialogue_with_its_answer_is_not_the_prompt(tmp_path: Path) -> None:
    dialogue = [*CHAT, {"role": "assistant", "content": "4"}]
    (task,) = load(tmp_path, FLEET | {"prompt": "2 + 2?", "messages": dialogue})
    assert (task.messages, task["messages"]) == ((), dialogue)
    (task,) = load(tmp_path, {"key": "k", "env_key": "e", "messages": CHAT})
    assert (task.prompt, task.chat) == ("2 + 2?", CHAT)
    assert Task.model_validate(task.model_dump()) == task
    with pytest.raises(TaskError, match="prompt is missing"):
        load(tmp_path, {"key": "k", "env_key": "e", "messages": dialogue})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": CHAT[:1]}, "row 1: prompt=.*at least one user message"),
        ({"prompt": [*CHAT, {"role": "robot", "content": "x"}]}, "row 1: prompt=.*with a role"),
        ({"prompt": [{"role": "user", "content": [1]}]}, "row 1: prompt=.*a text as content"),
        ({"prompt": []}, "row 1: prompt=.*write text, or messages"),
        ({"extra_info": "{'domain': 'x'}"}, r"row 1: extra_info=.*: not JSON"),
        ({"env_class": 3}, "row 1: env_class=3; Input should be a valid string"),
    ],
)
def test_an_invalid_prompt_or_column_is_named(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(TaskError, match=says):
        load(tmp_path, FLEET | fields)


def test_a_text_that_only_looks_like_json_stays_text(tmp_path: Path) -> None:
    for prompt in ("[1, 2] sorted?", "[1, 2]", '[{"role": "x"}]'):
        assert load(tmp_path, FLEET | {"prompt": prompt})[0].prompt == prompt


def test_rows_without_the_new_fields_keep_their_serialized_form() -> None:
    row = Task(key="k", env_key="e", prompt="p").model_dump()
    assert not {"messages", "env_class"} & row.keys()


def test_a_prompt_that_is_not_the_last_user_message_is_rejected() -> None:
    with pytest.raises(ValueError, match="prompt is not the last user message"):
        Task(key="k", env_key="e", prompt="other", messages=tuple(CHAT))


def test_long_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    tasks = load(tmp_path, *(FLEET | {"key": f"{n}", "prompt": "x " * n} for n in (1, 2, 3, 4)))
    kept, dropped = drop_long_prompts(tasks, lambda task: len(task.prompt.split()), 2)
    assert ([task.key for task in kept], dropped) == (["1", "2"], 2)
