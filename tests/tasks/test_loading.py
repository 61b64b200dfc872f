from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyfleet.errors import TaskError
from skyfleet.tasks.loading import load_tasks, parse_tasks, read_source, write_tasks
from skyfleet.tasks.task import RecordedCall, Task

PLAIN = Task(key="plain", env_key="github", prompt="Close issue 4.")
FULL = Task(
    key="full",
    env_key="booking",
    env_version="v0.0.65",
    modality="browser_use",
    prompt="Line one,\u2028line “two”.\nAnd \x85 three.",
    env_variables={"CURRENT_DATE": "2025-01-01", "NOTHING": None, "DEEP": {"a": [1, 2.5, True]}},
    data_key="kinesis",
    data_version="v0.0.4",
    verifier_code="def verify(env):\n    return 1\n",
    difficulty=3,
    solution=(RecordedCall(name="search", arguments={"q": "x", "n": None}), RecordedCall(name="e")),
    metadata={"template": {"id": 7}},
)
SUFFIXES = (".json", ".jsonl", ".parquet")


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("tasks", [[PLAIN], [FULL], [FULL, PLAIN]])
def test_written_data_is_read_back(tmp_path: Path, suffix: str, tasks: list[Task]) -> None:
    path = tmp_path / "deep" / f"tasks{suffix}"
    write_tasks(path, tasks)
    assert load_tasks(path) == tasks
    write_tasks(str(path), tasks[::-1])
    assert load_tasks(str(path)) == tasks[::-1]


def test_all_aliases_of_every_field_are_read(tmp_path: Path) -> None:
    exported = {
        "task_key": "k",
        "env_id": "booking",
        "version": "v1",
        "task_modality": "computer_use",
        "prompt": "p",
        "data_id": "kinesis",
        "verifier_func": "def f(): ...",
        "verifier_sha": "ignored: it describes verifier_func",
    }
    ours = Task(
        key="k",
        env_key="booking",
        env_version="v1",
        modality="computer_use",
        prompt="p",
        data_key="kinesis",
        verifier_code="def f(): ...",
    )
    assert load_tasks(written(tmp_path / "a.json", [exported])) == [ours]
    assert load_tasks(written(tmp_path / "b.json", {"tasks": [exported]})) == [ours]
    pq.write_table(pa.Table.from_pylist([exported]), tmp_path / "c.parquet")
    assert load_tasks(tmp_path / "c.parquet") == [ours]


def test_null_means_not_given(tmp_path: Path) -> None:
    row = {"key": "k", "task_key": None, "env_key": None, "env_id": "e", "prompt": "p"}
    path = written(tmp_path / "a.json", [row | {"env_variables": None, "difficulty": None}])
    assert load_tasks(path) == [Task(key="k", env_key="e", prompt="p")]


def test_parquet_columns_may_be_native(tmp_path: Path) -> None:
    row = {"key": "k", "env_key": "e", "prompt": "p", "env_variables": {"A": "1"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert load_tasks(tmp_path / "a.parquet")[0].env_variables == {"A": "1"}


def test_blank_lines_and_a_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff\n{"key": "k", "env_key": "e", "prompt": "p"}\n\n', encoding="utf-8")
    assert [task.key for task in load_tasks(path)] == ["k"]


ROW = {"key": "k", "env_key": "e", "prompt": "p"}
LONG = "x" * 5000


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "", r"a\.json: not JSON \(Expecting value: line 1 column 1"),
        ("a.json", "[]", r"a\.json: contains no task; write at least one"),
        ("a.jsonl", "\n", r"a\.jsonl: contains no task; write at least one"),
        ("a.json", '{"rows": []}', r"top level is \{'rows': \[\]\}; write an array"),
        ("a.json", '{"tasks": 3}', r"top level is 3; write an array"),
        ("a.json", [ROW, 7], r"a\.json row 2: 7 is not an object; write key, env_key"),
        ("a.json", [ROW, ROW], r"row 2: key='k' is already row 1; give every task its own"),
        ("a.json", [{"key": "k", "env_id": "e"}], r"row 1: prompt is missing; add it$"),
        ("a.json", [{"prompt": "p"}], r"row 1: env_key is missing; add it$"),
        ("a.json", [ROW | {"difficulty": "hard"}], r"row 1: difficulty='hard'; Input should be"),
        ("a.json", [ROW | {"difficulty": 10**30}], r"row 1: difficulty=1000.*less than or equal"),
        ("a.json", [ROW | {"difficulty": -1}], r"row 1: difficulty=-1; .*greater than or equal"),
        (
            "a.json",
            [ROW | {"metadata": {"a": ["\ud800"]}}],
            r"row 1: metadata=\{'a': .*ud800' is half",
        ),
        ("a.json", [ROW | {"env_variables": {"\udfff": 1}}], r"row 1: env_variables=\{.*is half a"),
        ("a.json", [ROW | {"solution": [{"name": "\ud800"}]}], r"row 1: solution=.*is half a surr"),
        ("a.json", [ROW | {"prompt": "\ud800"}], r"row 1: prompt="),
        ("a.json", [ROW | {"task_modality": "cu"}], r"row 1: task_modality='cu'; .*'browser_use'"),
        ("a.json", [ROW | {"solution": [{}]}], r"row 1: solution\.0\.name is missing"),
        ("a.jsonl", json.dumps(ROW) + '\n{"key"', r"a\.jsonl row 2: not JSON \(Expecting ':'"),
        ("a.csv", "key", r"a\.csv: suffix '\.csv'; choose from \.json, \.jsonl, \.parquet"),
        ("a.parquet", "key", r"a\.parquet: not parquet .*; write it again"),
    ],
)
def test_an_unreadable_row_is_named(tmp_path: Path, name: str, content: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        load_tasks(written(tmp_path / name, content))
    assert "\n" not in str(caught.value)


def test_a_long_value_is_shortened_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"difficulty='xxx.*\.\.\.x*'") as caught:
        load_tasks(written(tmp_path / "a.json", [ROW | {"difficulty": LONG}]))
    assert len(str(caught.value)) < 300


def test_a_parquet_cell_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([ROW | {"metadata": "{"}]), tmp_path / "a.parquet")
    with pytest.raises(TaskError, match=r"row 1: metadata='\{': not JSON"):
        load_tasks(tmp_path / "a.parquet")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"none\.json: no such file"):
        load_tasks(tmp_path / "none.json")
    with pytest.raises(TaskError, match=r"a\.csv: suffix '\.csv'"):
        write_tasks(tmp_path / "a.csv", [PLAIN])


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"key": "é"}'.encode("latin-1"))
    with pytest.raises(TaskError, match="save the file as UTF-8"):
        load_tasks(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"task_key": "l"}, r"row 1: key='k' and task_key='l' are the same field; keep one"),
        ({"env_key": "x", "env_id": "y"}, r"row 1: env_key='x' and env_id='y' are the same"),
        ({"verifier_code": "a", "verifier_func": "b"}, r"row 1: verifier_code='a' and verif"),
        ({"prompt": [{"role": "system", "content": "s"}]}, r"row 1: prompt=.*one user message"),
    ],
)
def test_aliases_that_disagree_are_rejected(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(TaskError, match=says):
        load_tasks(written(tmp_path / "a.json", [ROW | fields]))


def test_aliases_that_agree_are_accepted(tmp_path: Path) -> None:
    row = {"key": "k", "task_key": "k", "env_id": "e", "env_key": "e", "prompt": "p"}
    (task,) = load_tasks(written(tmp_path / "a.json", [row]))
    assert (task.key, task.env_key) == ("k", "e")


def test_a_prompt_of_five_megabytes_loads(tmp_path: Path) -> None:
    (task,) = load_tasks(written(tmp_path / "a.json", [ROW | {"prompt": "x" * 5_000_000}]))
    assert len(task.prompt) == 5_000_000


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ("9" * 5000, r"too large to read \(.*digits.*\); write a shorter number"),
        ("[" * 100_000 + "]" * 100_000, r"too large to read \(.*recursion.*nest it less"),
        ("[" * 150 + "1" + "]" * 150, r"row 1: more than 100 levels deep; nest it less"),
    ],
)
def test_numbers_too_long_and_values_too_deep_are_named(
    tmp_path: Path, name: str, metadata: str, says: str
) -> None:
    row = json.dumps(ROW)[:-1] + f', "metadata": {{"a": {metadata}}}}}'
    path = written(tmp_path / name, f"[{row}]" if name == "a.json" else row)
    with pytest.raises(TaskError, match=says) as caught:
        load_tasks(path)
    assert len(str(caught.value)) < 400


def test_rows_can_be_parsed_from_bytes_that_were_hashed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", [ROW])
    data = read_source(path)
    path.unlink()
    assert [(number, task.key) for number, task in parse_tasks(data, path)] == [(1, "k")]
