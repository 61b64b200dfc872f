"""A whole training run with a critic, and the learning-rate schedules of both optimisers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.fakes.moody_world import open_moody
from tests.fakes.small_runs import rows, small_config
from tests.trainer.interrupting import interrupt_training

from skyfleet.config.root import RunConfig
from skyfleet.envs import registry
from skyfleet.errors import ConfigError, ModelError
from skyfleet.trainer.assemble import assemble
from skyfleet.trainer.training_run import run_training

ROLLOUT = "skyfleet.trainer.rollouts:collect"
GAE = (
    *("trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=tiny"),
    *("trainer.critic.optimizer_config.lr=0.001", "trainer.algorithm.use_kl_loss=false"),
    *("data.val_data=[]", "trainer.ckpt_interval=1"),
)


@pytest.fixture(autouse=True)
def _moody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an environment whose rewards differ within a group, so every step changes the weights."""
    monkeypatch.setitem(registry.ENV_CLASSES, "world", lambda _: open_moody)


def gae_config(folder: Path, *overrides: str) -> RunConfig:
    return small_config(folder, *GAE, *overrides)


async def test_repeated_steps_on_one_batch_lower_the_critic_loss(tmp_path: Path) -> None:
    run = await assemble(gae_config(tmp_path, "trainer.algorithm.value_clip=null"))
    with run.journal.open_step(1, policy_version=0) as journal:
        _, kept = await run.rollouts.collect(1, lambda *_: None, journal)
    samples = run.compute_samples(kept.groups)
    reports = [await run.learner.step(samples) for _ in range(3)]
    await run.close()
    losses = [report.metrics["critic/critic_loss"] for report in reports]
    assert losses[0] > losses[1] > losses[2] > 0


async def test_a_run_logs_its_critic_and_saves_it_beside_the_policy(tmp_path: Path) -> None:
    await run_training(gae_config(tmp_path))
    logged = {"critic_loss", "values_mean", "values_clipfrac", "critic_lr", "grad_norm"}
    for row in rows(tmp_path)[1:]:
        assert {k for k in row if k.startswith("critic/")} == {f"critic/{name}" for name in logged}
        # The learner computes these advantages; the samples it receives have none yet.
        assert row["loss/avg_raw_advantages_abs"] > 0.1
    folders = [tmp_path / "checkpoints" / f"global_step_{step}" / "critic" for step in (0, 1, 3)]
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [
        [],
        ["critic.pt"],
        ["critic.pt"],
    ]
    heads = [torch.load(f / "critic.pt", weights_only=True)["value_head"] for f in folders[1:]]
    assert not heads[0].equal(heads[1])


async def test_a_resumed_critic_run_matches_an_uninterrupted_one(tmp_path: Path) -> None:
    scheduled = (
        "trainer.max_training_steps=2",
        "trainer.critic.optimizer_config.scheduler=cosine",
        "trainer.critic.optimizer_config.num_warmup_steps=2",
        "trainer.policy.optimizer_config.scheduler=linear",
    )
    await run_training(gae_config(tmp_path / "straight", *scheduled))
    config = gae_config(tmp_path / "interrupted", *scheduled)
    await interrupt_training(config, ROLLOUT, call=2, loops=12)
    await run_training(config)
    assert rows(tmp_path / "interrupted") == rows(tmp_path / "straight")


async def test_a_linear_learning_rate_falls_over_all_optimiser_steps(tmp_path: Path) -> None:
    scheduled = ("trainer.policy.optimizer_config.scheduler=linear", "data.val_data=[]")
    await run_training(small_config(tmp_path, *scheduled))
    # Two updates per step, six in all: 1, 5/6, 4/6, 3/6, 2/6, 1/6 of 0.01, logged as means of two.
    rates = [row["policy/policy_lr"] for row in rows(tmp_path)[1:]]
    assert rates == pytest.approx([0.11 / 12, 0.07 / 12, 0.03 / 12])


async def test_an_unreadable_critic_is_an_error_that_names_its_key(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"^trainer\.critic\.model\.path='/nowhere' is not a model"
    ):
        await run_training(gae_config(tmp_path, "trainer.critic.model.path=/nowhere"))


async def test_gae_without_a_critic_is_refused_before_any_rollout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gae needs a critic"):
        await assemble(small_config(tmp_path, GAE[0]))
