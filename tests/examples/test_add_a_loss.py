"""The loss and the estimator of examples/add_a_loss work as its README says."""

from __future__ import annotations

from math import tanh
from pathlib import Path

import pytest
import torch
from examples.add_a_loss.loss import compare_with_best, smooth_clip
from tests.algorithms.test_losses import inputs
from tests.fakes.moody_world import open_moody
from tests.fakes.small_runs import rows, small_config

from skyfleet.algorithms.registry import build_policy_loss
from skyfleet.envs import registry
from skyfleet.trainer.training_run import run_training


def test_the_loss_is_a_smooth_version_of_ppos_clip() -> None:
    output = smooth_clip(inputs([1.0, 1.2, 3.0], [1.0, -1.0, 1.0]))
    expected = [-1.0, 1 + 0.2 * tanh(1), -1.2]
    assert output.loss_T.tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(output.metrics_T["smooth_clip_ratio"][2], torch.tensor(1.0))


def test_only_a_new_best_has_a_positive_advantage() -> None:
    assert compare_with_best([1.0, 0.5, 0.0]) == [0.5, -0.5, -1.0]
    assert compare_with_best([1.0, 1.0, 0.0]) == [0.0, 0.0, -1.0]
    assert compare_with_best([0.5]) == [0.0]


async def test_a_run_trains_with_the_loss_and_the_estimator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.ENV_CLASSES, "world", lambda _: open_moody)
    config = small_config(
        tmp_path,
        "trainer.algorithm.policy_loss_type=examples.add_a_loss.loss:smooth_clip",
        "trainer.algorithm.policy_loss_kwargs.width=0.1",
        "trainer.algorithm.advantage_estimator=examples.add_a_loss.loss:compare_with_best",
        "trainer.max_training_steps=1",
        "trainer.eval_interval=-1",
        "trainer.eval_before_train=false",
        "trainer.algorithm.use_kl_loss=false",
    )
    smooth = build_policy_loss(config.trainer.algorithm)(inputs([3.0], [1.0]))
    assert smooth.loss_T.tolist() == pytest.approx([-1.1], abs=1e-5)
    await run_training(config)
    row = rows(tmp_path)[-1]
    assert "policy/smooth_clip_ratio" in row
    assert row["policy/grad_norm"] > 0
