"""Exports and dumps of a run, and a reference model that is updated every epoch."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.fakes.moody_world import open_moody
from tests.fakes.small_runs import rows, small_config
from tests.trainer.interrupting import interrupt_training

from skyfleet.envs import registry
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.archive import read_trajectories, train_path

ROLLOUT = "skyfleet.trainer.rollouts:collect"
NO_EVALUATION = "data.val_data=[]"
UPDATE_REF = ("trainer.update_ref_every_epoch=true", NO_EVALUATION)


@pytest.fixture(autouse=True)
def _moody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an environment whose rewards differ within a group, so every step changes the weights."""
    monkeypatch.setitem(registry.ENV_CLASSES, "world", lambda _: open_moody)


async def test_the_policy_is_exported_at_its_interval_and_at_the_end(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path, "trainer.hf_save_interval=2", NO_EVALUATION))
    exports = tmp_path / "exports"
    assert {path.name for path in exports.iterdir()} == {"global_step_2", "global_step_3"}
    for step in (2, 3):
        exported = exports / f"global_step_{step}" / "policy"
        assert {"config.json", "tokenizer.json"} <= {path.name for path in exported.iterdir()}
        assert not (exported / "optimizer.pt").exists()
        ours = load_file(exported / "model.safetensors")
        saved = load_file(tmp_path / f"checkpoints/global_step_{step}/policy/model.safetensors")
        assert all(ours[name].equal(saved[name]) for name in saved)


async def test_batches_and_episodes_are_dumped_in_skyrls_format(tmp_path: Path) -> None:
    await run_training(
        small_config(
            tmp_path,
            "trainer.dump_data_batch=true",
            "trainer.dump_training_trajectories=true",
            "trainer.max_training_steps=1",
            NO_EVALUATION,
        )
    )
    exports = tmp_path / "exports"
    batch = pickle.loads((exports / "dumped_data/global_step_1_training_input.pkl").read_bytes())
    assert len(batch) == rows(tmp_path)[-1]["loss/num_samples"]
    assert all(len(sample["token_ids"]) == len(sample["advantages"]) for sample in batch)
    path = exports / "dumped_training_trajectories/global_step_1.jsonl"
    dumped = [json.loads(line) for line in path.read_text().splitlines()]
    trajectories = list(read_trajectories(train_path(tmp_path / "trajectories", 1)))
    assert sorted((row["task_key"], str(row["reward"])) for row in dumped) == sorted(
        (t.task_key, str(t.reward)) for t in trajectories
    )
    for row in dumped:
        assert (row["step"], row["env_key"], row["image_paths"]) == (1, "github", [])
        assert row["prompt"].startswith("<|im_start|>")
        assert row["tokens"] > 0
        assert row["turns"] > 0


async def test_an_example_is_printed_at_its_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run_training(small_config(tmp_path, "trainer.print_example_interval=2", NO_EVALUATION))
    printed = capsys.readouterr().out
    heads = [
        line for line in printed.splitlines() if line.startswith("step ") and ", reward " in line
    ]
    assert len(heads) == 1
    assert heads[0].startswith("step 2, github")
    best = max(t.reward or 0.0 for t in read_trajectories(train_path(tmp_path / "trajectories", 2)))
    assert float(heads[0].split()[-1]) <= best
    assert "[user] " in printed


async def test_the_reference_becomes_the_policy_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """Four tasks in batches of two: the second step ends an epoch."""
    await run_training(small_config(tmp_path / "stays", NO_EVALUATION))
    following = small_config(
        tmp_path / "follows", *UPDATE_REF, "trainer.max_ckpts_to_keep=1", "trainer.ckpt_interval=-1"
    )
    await run_training(following)
    stays, follows = rows(tmp_path / "stays"), rows(tmp_path / "follows")
    assert follows[:3] == stays[:3]
    # In the first of the two mini-batches policy and reference are equal.
    assert 0 < follows[3]["policy/policy_kl"] < stays[3]["policy/policy_kl"]
    saved = {path.name for path in (tmp_path / "follows/checkpoints").glob("global_step_*")}
    assert saved == {"global_step_0", "global_step_2", "global_step_3"}


async def test_a_resumed_run_restores_the_reference_of_the_last_epoch(
    tmp_path: Path,
) -> None:
    await run_training(small_config(tmp_path / "straight", *UPDATE_REF))
    config = small_config(tmp_path / "interrupted", *UPDATE_REF)
    await interrupt_training(config, ROLLOUT, call=3, loops=3)
    await run_training(config)
    assert rows(tmp_path / "interrupted") == rows(tmp_path / "straight")
