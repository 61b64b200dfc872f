"""Runs whose checkpoints, dumps and episodes are in a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.buckets import serve_s3, use_bucket
from tests.fakes.small_runs import rows, small_config

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.checkpoints.resume import list_complete_checkpoints
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.storage.objects import list_objects, read_object, write_object
from skyfleet.trainer.resuming import find_newer_in_bucket
from skyfleet.trainer.training_run import run_training


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serve_s3() as url:
        yield url


def make_config(folder: Path, bucket: str, *overrides: str) -> RunConfig:
    return small_config(
        folder,
        *("trainer.run_name=first", f"trainer.ckpt_bucket={bucket}"),
        *(f"trainer.trajectory_bucket={bucket}", "trainer.ckpt_interval=1"),
        *("data.val_data={val: ['world:github?split=unseen_tasks&count=3']}", *overrides),
    )


async def test_a_run_goes_on_in_another_folder_from_what_is_in_its_bucket(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = use_bucket(monkeypatch, endpoint, "resumed")
    await run_training(make_config(tmp_path / "a", bucket, "trainer.max_training_steps=2"))
    saved = BucketCheckpoints(address=f"{bucket}/skyfleet/tiny/first")
    assert saved.list_complete_steps() == [2, 1, 0]
    # An incomplete one is not found, whatever its number.
    write_object(f"{saved.step_address(7)}/policy/model.safetensors", b"half")

    longer = make_config(tmp_path / "b", bucket, "trainer.max_training_steps=4")
    assert find_newer_in_bucket(longer) == saved.step_address(2)
    said: list[str] = []
    outcome = await run_training(longer, on_progress=said.append)
    assert f"downloading {saved.step_address(2)}" in said
    assert any(line.startswith("resuming first at step 2") for line in said)
    assert [row["step"] for row in rows(tmp_path / "b")] == [0, 1, 2, 3, 4]
    assert rows(tmp_path / "b")[:3] == rows(tmp_path / "a")
    assert outcome.comparisons, "step 0 was evaluated on the other machine"

    straight = make_config(tmp_path / "c", str(tmp_path / "bucket"), "trainer.max_training_steps=4")
    await run_training(straight)
    assert rows(tmp_path / "c") == rows(tmp_path / "b")
    same = BucketCheckpoints(address=f"{tmp_path}/bucket/skyfleet/tiny/first")
    one, other = (place.read_manifest(4) for place in (saved, same))
    assert one
    assert other
    assert one.files["policy/model.safetensors"] == other.files["policy/model.safetensors"]

    local = [c.step for c in list_complete_checkpoints(tmp_path / "c" / "checkpoints")]
    assert 4 in local, "never the newest"
    assert 1 not in local or 3 not in local, "uploaded copies are deleted"
    _check_trajectories(bucket)
    with pytest.raises(ConfigError, match=r"trainer\.seed"):
        await run_training(make_config(tmp_path / "d", bucket, "trainer.seed=1"))
    with pytest.raises(ConfigError, match="resume_mode=none, but s3://"):
        await run_training(make_config(tmp_path / "d", bucket, "trainer.resume_mode=none"))


def _check_trajectories(bucket: str) -> None:
    dumps = {info.name for info in list_objects(f"{bucket}/evals/first")}
    assert {"global_step_0/github.jsonl", "global_step_2/aggregated_results.jsonl"} <= dumps
    results = json.loads(
        read_object(f"{bucket}/evals/first/global_step_0/{'aggregated_results'}.jsonl")
    )
    assert results["eval/all/generate/avg_num_tokens"] > 0
    assert results["eval/all/environment/avg_turns"] > 0
    names = {info.name for info in list_objects(f"{bucket}/runs/first")}
    assert {"config.yaml", "metrics.jsonl", "results.md"} <= names
    assert {f"trajectories/train/step_{step:06d}.jsonl.gz" for step in (1, 2, 3, 4)} <= names
    assert not any("checkpoints" in name for name in names)
