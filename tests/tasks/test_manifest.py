"""Prepared datasets: tables that SkyRL and `load_tasks` read, and their manifest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from skyfleet.errors import ConfigError, TaskError
from skyfleet.tasks.from_objects import as_tasks
from skyfleet.tasks.loading import load_tasks
from skyfleet.tasks.manifest import Manifest, make_manifest, name_version, read_manifest, row_sha256
from skyfleet.tasks.prepare import PreparedDataset, PrepareOptions, prepare
from skyfleet.tasks.publish import dataset_files, fleet_table, publish
from skyfleet.tasks.splits import SplitRule
from skyfleet.tasks.task import RecordedCall, Task

FULL = Task(
    key="full",
    env_key="booking",
    env_version="v0.0.65",
    modality="browser_use",
    prompt="Line one,\u2028“two”.\nThree.",
    env_variables={"USER": "Ana", "CURRENT_DATE": "2025-01-01", "NOTHING": None},
    data_key="kinesis",
    data_version="v0.0.4",
    verifier_code="def verify(env):\n    return 1\n",
    difficulty=3,
    solution=(RecordedCall(name="search", arguments={"q": "x", "n": None}),),
    metadata={"template": {"id": 7}},
)


def build(keys: str, earlier: Manifest | None = None) -> tuple[PreparedDataset, Manifest]:
    rows = [(i, Task(key=key, env_key="e", prompt=f"do {key}")) for i, key in enumerate(keys)]
    rule = SplitRule(eval_fraction=0.25, min_eval_tasks=1)
    prepared = prepare(rows, PrepareOptions(split=rule))
    manifest = make_manifest(
        prepared,
        dataset_files(prepared),
        source="raw.json",
        source_sha256="0" * 64,
        options={"eval_ratio": 0.25},
        split_by="ratio",
        earlier=earlier,
    )
    return prepared, manifest


def test_the_tables_have_fleets_columns_and_the_prompt_as_one_user_message(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(fleet_table([FULL]))
    (row,) = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert row["prompt"] == [{"role": "user", "content": FULL.prompt}]
    assert (row["env_class"], row["task_key"], row["data_source"]) == (
        "fleet_task",
        "full",
        "booking",
    )
    assert row["env_variable_keys"] == '["CURRENT_DATE", "NOTHING", "USER"]'


def test_the_tables_load_as_the_same_tasks(tmp_path: Path) -> None:
    plain = Task(key="plain", env_key="github", prompt="p")
    (tmp_path / "a.parquet").write_bytes(fleet_table([FULL, plain]))
    tasks = load_tasks(tmp_path / "a.parquet")
    assert tasks == [FULL, plain]
    assert tasks[0].env_class is None, "Fleet's tables name fleet_task in every row"
    assert [row_sha256(task) for task in tasks] == [row_sha256(FULL), row_sha256(plain)]


def test_skyrl_rows_stay_the_same_tasks_in_the_published_tables(tmp_path: Path) -> None:
    rows = as_tasks(
        [
            {
                "data_source": "tau_bench",
                "env_class": "tau_bench",
                "prompt": [
                    {"role": "system", "content": "policy"},
                    {"role": "user", "content": "hi"},
                    {"role": "tool", "content": "42", "name": "look_up"},
                    {"role": "user", "content": "bye"},
                ],
                "reward_spec": {"actions": []},
                "extra_info": {"domain": "retail", "index": 3},
            },
            {"prompt": "p", "env_class": "mine:Env", "count": 2},
        ]
    )
    (tmp_path / "a.parquet").write_bytes(fleet_table(rows))
    assert load_tasks(tmp_path / "a.parquet") == rows


def test_the_manifest_counts_and_hashes_what_was_written(tmp_path: Path) -> None:
    prepared, manifest = build("abcdefgh")
    files = dataset_files(prepared)
    publish(str(tmp_path / "out"), files, manifest)
    assert read_manifest(tmp_path / "out" / "manifest.json") == manifest
    assert manifest.counts == {"e": {"train": 6, "validation": 2}}
    assert manifest.unique_prompts == {"train": 6, "validation": 2}
    assert manifest.thresholds == {"e": 0.25}
    for name, digest in manifest.files.items():
        written = (tmp_path / "out" / name).read_bytes()
        assert hashlib.sha256(written).hexdigest() == digest
    assert [key for key, entry in manifest.tasks.items() if entry.side == "validation"] == [
        "a",
        "h",
    ]
    assert [task.key for task in load_tasks(tmp_path / "out" / "validation.parquet")] == ["a", "h"]


@pytest.mark.parametrize(
    ("source", "version"),
    [
        ("s3://fleet-internal-datasets/v0.2/openenv/all_tool_use.json", "v0.2"),
        ("data/v1/v1.10.3/raw.jsonl", "v1.10.3"),
        ("raw.json", "sha256-0123456789ab"),
        ("vendor/v/tasks_v2.json", "sha256-0123456789ab"),
    ],
)
def test_a_version_without_a_name_is_named_after_its_source(source: str, version: str) -> None:
    assert name_version(source, "0123456789abcdef" * 4) == version


def test_manifests_of_earlier_versions_have_no_data_version() -> None:
    _, manifest = build("abcdefgh")
    assert manifest.data_version == "sha256-000000000000"
    rows = json.loads(manifest.to_bytes())
    del rows["data_version"]
    assert Manifest.model_validate(rows).data_version is None


def test_the_same_rows_give_the_same_bytes() -> None:
    assert build("abcdefgh")[1].to_bytes() == build("abcdefgh")[1].to_bytes()


def test_the_manifest_lists_the_tasks_that_changed_side() -> None:
    _, before = build("abcdefgh")
    _, after = build("abcdfgh", earlier=before)  # without e, h moves: see test_splits
    assert after.moved == {"h": "train"}
    assert before.moved == {}


def test_the_row_hash_covers_every_field() -> None:
    edited = FULL.model_copy(update={"verifier_code": "def verify(env):\n    return 0\n"})
    assert row_sha256(edited) != row_sha256(FULL)
    assert row_sha256(Task.model_validate(FULL.model_dump())) == row_sha256(FULL)


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    prepared, manifest = build("abcdefgh")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"contains 'notes.txt', which would be lost"):
        publish(str(tmp_path), dataset_files(prepared), manifest)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match="is a file; set it to a folder"):
        publish(str(tmp_path / "notes.txt"), dataset_files(prepared), manifest)


def test_a_dataset_folder_is_replaced_atomically(tmp_path: Path) -> None:
    for keys in ("abcdefgh", "abcdfgh"):
        prepared, manifest = build(keys)
        publish(str(tmp_path / "out"), dataset_files(prepared), manifest)
    assert len(load_tasks(tmp_path / "out" / "train.parquet")) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_invalid_manifest_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format_version": 1}')
    with pytest.raises(TaskError, match=r"manifest.json: source: Field required.*prepare"):
        read_manifest(tmp_path / "manifest.json")
