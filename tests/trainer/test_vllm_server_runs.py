"""Whole runs against servers that are trained: weights reach them before the first turn and after each step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.loopback_vllm import LoopbackVllm, replace_weights
from tests.fakes.serving import serving
from tests.fakes.small_runs import rows, small_config

from skyfleet.config.root import RunConfig
from skyfleet.engines import vllm_worker
from skyfleet.errors import ConfigError, SentinelError
from skyfleet.models.loading import load_model
from skyfleet.trainer.session import run_training

SHORT = ("data.val_data=[]", "trainer.max_training_steps=1", "trainer.warm_start.steps=1")
CAPACITY = 1012
"""1000 of prompt, 12 of the last turn."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    asyncio.run(run_training(small_config(folder, *SHORT)))
    return folder / "checkpoints/global_step_1/policy"


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_worker, "_replace", replace_weights)


def configured(folder: Path, policy: Path, *urls: str, more: tuple[str, ...] = ()) -> RunConfig:
    return small_config(
        folder,
        "generator.backend=vllm",
        "generator.run_engines_locally=false",
        f"generator.remote_inference_engine_urls=[{','.join(urls)}]",
        f"trainer.policy.model.path={policy}",
        "trainer.policy.model_config_kwargs={}",
        "data.val_data=[]",
        "trainer.max_training_steps=2",
        "trainer.warm_start.steps=0",
        *more,
    )


def serving_another(policy: Path, **settings: Any) -> LoopbackVllm:
    """Started with weights that are not the run's."""
    cpu = torch.device("cpu")
    loaded = load_model(str(policy), dtype=torch.float32, device=cpu, config_kwargs={})
    with torch.no_grad():
        for weight in loaded.module.parameters():
            weight.mul_(0.5)
    return LoopbackVllm(loaded, capacity=CAPACITY, **settings)


def gaps(folder: Path) -> Iterator[float]:
    return (row["policy/rollout_train_logprobs_abs_diff_mean"] for row in rows(folder)[1:])


async def test_a_server_learns_what_the_learner_learns_asleep_meanwhile(
    policy: Path, tmp_path: Path
) -> None:
    server = serving_another(policy, sleep_mode=True)
    async with serving(server) as url:
        await run_training(configured(tmp_path, policy, url))
    step = ["sleep 2 wait", "wake_up weights", "load", "wake_up kv_cache"]
    assert server.told == ["pause keep true", "load", "resume", *step, *step]
    # The sentinels, which would have stopped the run, saw the learner's logprobs in the server.
    assert max(gaps(tmp_path)) < 1e-4
    assert len(set(server.salts)) == 2  # the last weights were not spoken with


async def test_several_servers_are_one_policy_and_a_resumed_run_may_find_them_elsewhere(
    policy: Path, tmp_path: Path
) -> None:
    one, other, later = (serving_another(policy) for _ in range(3))
    apart = ("trainer.placement.colocate_all=false",)
    async with serving(one) as first, serving(other) as second:
        await run_training(configured(tmp_path, policy, first, second, more=apart))
    assert one.told == other.told == ["pause keep true", "load", "resume"] * 3
    assert len(one.salts) > 0 < len(other.salts)
    longer = (*apart, "trainer.max_training_steps=3")
    async with serving(later) as third:
        await run_training(configured(tmp_path, policy, third, more=longer))
    assert later.told == ["pause keep true", "load", "resume"] * 2
    assert len(rows(tmp_path)) == 4
    assert max(gaps(tmp_path)) < 1e-4


async def test_a_server_that_keeps_its_own_weights_stops_the_run(
    policy: Path, tmp_path: Path
) -> None:
    server = serving_another(policy)
    server.breaks = "sums"
    async with serving(server) as url:
        with pytest.raises(SentinelError, match="has other weights than the learner"):
            await run_training(configured(tmp_path, policy, url))


async def test_a_server_that_cannot_be_trained_is_told_before_the_run_has_a_row(
    policy: Path, tmp_path: Path
) -> None:
    async with serving(serving_another(policy, dev_mode=False)) as url:
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            await run_training(configured(tmp_path, policy, url))
    assert not (tmp_path / "metrics.jsonl").exists()
