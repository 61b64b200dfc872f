"""Tasks from Python objects: dicts, frames, tables, iterables and paths."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from skyfleet.errors import TaskError
from skyfleet.tasks import from_objects
from skyfleet.tasks.from_objects import as_task, as_tasks, split
from skyfleet.tasks.loading import write_tasks
from skyfleet.tasks.splits import SplitRule, split_tasks
from skyfleet.tasks.task import Task

ROWS = [{"prompt": f"Press the button {n} times.", "times": n} for n in range(1, 65)]


class Dataset:
    """Iterates over dict rows, as a Hugging Face dataset does."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


def test_a_dict_needs_only_a_prompt() -> None:
    tasks = as_tasks(ROWS)
    assert tasks[4].prompt == "Press the button 5 times."
    assert (tasks[4].env_key, tasks[4]["times"], tasks[4].metadata) == ("env", 5, {"times": 5})
    assert len({task.key for task in tasks}) == 64
    assert as_task(ROWS[4]) == tasks[4]
    assert as_task(tasks[4]) is tasks[4]


def test_the_examples_of_the_docstrings_run() -> None:
    assert doctest.testmod(from_objects) == (0, 6)


def test_all_kinds_of_sources_give_the_same_tasks(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    tasks = as_tasks(ROWS)
    write_tasks(tmp_path / "tasks.parquet", tasks)
    for source in (
        tasks,
        tuple(ROWS),
        (row for row in ROWS),
        [tasks[0], *ROWS[1:]],
        Dataset(),
        pandas.DataFrame(ROWS),
        pa.Table.from_pylist(ROWS),
        tmp_path / "tasks.parquet",
        str(tmp_path / "tasks.parquet"),
    ):
        assert as_tasks(source) == tasks


def test_missing_values_of_a_frame_are_not_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([{"prompt": "p", "a": 1}, {"prompt": "q", "b": "x"}])
    assert [task.metadata for task in as_tasks(frame)] == [{"a": 1}, {"b": "x"}]


def test_none_in_a_dict_is_a_value_and_not_a_missing_column() -> None:
    task = as_task({"prompt": "p", "hint": None, "price": float("nan"), "difficulty": None})
    assert (task["hint"], task["price"], task.difficulty) == (None, None, None)
    assert task.metadata == {"hint": None, "price": None}
    given, missing = ({"prompt": "p", "n": 1, "hint": None}, {"prompt": "p", "n": 1})
    assert as_task(given).key == as_task(missing).key


@pytest.mark.parametrize(
    ("name", "value"),
    [("difficulty", "hard"), ("version", 2), ("modality", "text"), ("data_id", 5)],
)
def test_a_column_of_the_environment_may_have_the_name_of_a_field(name: str, value: object) -> None:
    task = as_task({"prompt": "p", name: value})
    assert (task[name], task.metadata) == (value, {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("difficulty", 3), ("version", "v2"), ("modality", "browser_use"), ("data_id", "d")],
)
def test_a_valid_field_is_found_by_the_name_that_the_row_used(name: str, value: object) -> None:
    task = as_task({"prompt": "p", name: value})
    assert (task[name], task.metadata) == (value, {})
    assert name in task


def test_a_number_as_key_becomes_its_text() -> None:
    assert as_task({"prompt": "p", "key": 7}).key == "7"


def test_numpy_values_are_converted() -> None:
    numpy = pytest.importorskip("numpy")
    prompt = numpy.array([{"role": "user", "content": "p"}], dtype=object)
    task = as_task({"prompt": prompt, "n": numpy.int64(3), "list": numpy.array([1, 2])})
    assert (task.prompt, task.metadata) == ("p", {"n": 3, "list": [1, 2]})


def test_a_file_of_prompts_needs_no_environment(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p"}\n')
    assert as_tasks(tmp_path / "a.jsonl")[0].env_key == "env"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([{"prompt": "p"}, {"text": "q"}], "tasks row 2: prompt is missing; add it"),
        ([{"prompt": "p"}, "q"], "tasks row 2: 'q' is not a dict; write"),
        ([{"prompt": "p", "key": "a"}, {"prompt": "q", "key": "a"}], "row 2: key='a' is already"),
        ([{"prompt": 5, "key": "a"}], "tasks row 1: prompt=5; Input should"),
        ([{"prompt": "p", "f": print}], "tasks row 1: f=<built-in .*convert or remove it"),
        ({"train": []}, r'tasks is a dict with the keys .*, such as dataset\["train"\]'),
        (Task(key="k", env_key="e", prompt="p"), "tasks is one Task; pass a list"),
        ([], "tasks is empty; pass at least one"),
        (7, "tasks=7; pass a list of dicts"),
        ("none.jsonl", "none.jsonl: no such file"),
    ],
)
def test_an_invalid_source_names_row_and_remedy(source: object, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        as_tasks(source)


def test_split_uses_the_hash_split_of_prepare() -> None:
    tasks = as_tasks(ROWS)
    train, evaluation = split(ROWS, eval_ratio=0.1)
    expected = split_tasks(tasks, SplitRule(eval_fraction=0.1))
    assert (train, evaluation) == (list(expected.train), list(expected.eval))
    assert {task.key for task in split(ROWS[::-1])[1]} == {task.key for task in evaluation}
    assert len(train) + len(evaluation) == 64


def test_a_split_with_an_empty_side_is_rejected() -> None:
    with pytest.raises(TaskError, match=r"eval_ratio=0.1 of 20 tasks .*raise it to 0.25 or more"):
        split(ROWS[:20])
    with pytest.raises(TaskError, match=r"eval_ratio=1.0 leaves no task to train on"):
        split(ROWS, eval_ratio=1.0)


def test_the_example_of_the_data_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out.startswith("Press the button ")
