"""Training with remote vLLM servers: they get weights before the first turn and after each step."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.types import Receive, Scope, Send
from tests.fakes.loopback_vllm import MEMORY, LoopbackVllm, replace_weights
from tests.fakes.serving import serving
from tests.fakes.small_runs import UNSEEN, rows, small_config

from skyfleet.checkpoints.resume import find_checkpoint
from skyfleet.config.root import RunConfig
from skyfleet.engines import http_client, vllm_worker
from skyfleet.errors import ConfigError, SentinelError
from skyfleet.models.loading import LoadedModel, load_model
from skyfleet.trainer.policy_client import open_inference_client
from skyfleet.trainer.training_run import run_training

SHORT = ("data.val_data=[]", "trainer.max_training_steps=1", "trainer.warm_start.steps=1")
CAPACITY = 1012
"""Tokens: 1,000 of prompt and 12 of the last turn."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    asyncio.run(run_training(small_config(folder, *SHORT)))
    return folder / "checkpoints/global_step_1/policy"


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_worker, "_replace", replace_weights)


def make_config(folder: Path, policy: Path, *urls: str, more: tuple[str, ...] = ()) -> RunConfig:
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


def load_policy(policy: Path) -> LoadedModel:
    cpu = torch.device("cpu")
    return load_model(str(policy), dtype=torch.float32, device=cpu, config_kwargs={})


def make_stale_server(policy: Path, **settings: Any) -> LoopbackVllm:
    """A server that starts with other weights than the run."""
    loaded = load_policy(policy)
    with torch.no_grad():
        for weight in loaded.module.parameters():
            weight.mul_(0.5)
    return LoopbackVllm(loaded, capacity=CAPACITY, **settings)


def logprob_gaps(folder: Path) -> Iterator[float]:
    return (row["policy/rollout_train_logprobs_abs_diff_mean"] for row in rows(folder)[1:])


async def test_a_server_sleeps_during_learning_and_receives_the_new_weights(
    policy: Path, tmp_path: Path
) -> None:
    server = make_stale_server(policy, sleep_mode=True)
    async with serving(server) as url:
        await run_training(make_config(tmp_path, policy, url))
    step = ["sleep 2 wait", "wake_up weights", "load", "wake_up kv_cache"]
    assert server.received == ["pause keep true", "load", "resume", *step, *step]
    # The server's logprobs match the learner's; a sentinel stops the run otherwise.
    assert max(logprob_gaps(tmp_path)) < 1e-4
    assert len(set(server.salts)) == 2  # no request used the last weights


async def test_several_servers_hold_one_policy_and_a_resumed_run_may_use_others(
    policy: Path, tmp_path: Path
) -> None:
    one, other, later = (make_stale_server(policy) for _ in range(3))
    apart = ("trainer.placement.colocate_all=false",)
    async with serving(one) as first, serving(other) as second:
        await run_training(make_config(tmp_path, policy, first, second, more=apart))
    assert one.received == other.received == ["pause keep true", "load", "resume"] * 3
    assert len(one.salts) > 0 < len(other.salts)
    longer = (*apart, "trainer.max_training_steps=3")
    async with serving(later) as third:
        await run_training(make_config(tmp_path, policy, third, more=longer))
    assert later.received == ["pause keep true", "load", "resume"] * 2
    assert len(rows(tmp_path)) == 4
    assert max(logprob_gaps(tmp_path)) < 1e-4


class Dying(LoopbackVllm):
    """Stops answering at its third turn."""

    n_turns = 0

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.n_turns += scope["method"] == "POST"
        if self.n_turns == 3:
            self.breaks, self.is_healthy = "completions", False
        await super()._generate(scope, receive, send)


async def test_a_run_continues_without_a_server_that_dies(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "INITIAL_BACKOFF_SECONDS", 0.01)
    dying, other = Dying(load_policy(policy), capacity=CAPACITY), make_stale_server(policy)
    apart = ("trainer.placement.colocate_all=false",)
    async with serving(dying) as first, serving(other) as second:
        await run_training(make_config(tmp_path, policy, first, second, more=apart))
    assert len(rows(tmp_path)) == 3
    assert dying.received == ["pause keep true", "load", "resume"]
    assert other.received == ["pause keep true", "load", "resume"] * 3
    assert all(row["generate/ending_failed"] == 0 for row in rows(tmp_path)[1:])
    assert max(logprob_gaps(tmp_path)) < 1e-4


async def test_a_server_that_keeps_its_own_weights_stops_the_run(
    policy: Path, tmp_path: Path
) -> None:
    server = make_stale_server(policy)
    server.breaks = "sums"
    async with serving(server) as url:
        with pytest.raises(SentinelError, match="holds weights that differ from the learner"):
            await run_training(make_config(tmp_path, policy, url))


class Restarting(LoopbackVllm):
    """Restarts at the first turn after its `loads`-th weight update."""

    loads = 0

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and len(self.loaded) == self.loads:
            self.start_again()
        await super()._generate(scope, receive, send)


@pytest.mark.parametrize(
    ("loads", "val_data", "n_rows", "reported", "trained_steps"),
    [
        pytest.param(1, "[]", 1, set(), 0, id="in training"),
        # The update of step 2 learnt from verified turns, so it is kept and evaluated again.
        pytest.param(3, f"{{unseen: ['{UNSEEN}']}}", 2, {"step_000000"}, 2, id="in an evaluation"),
    ],
)
async def test_turns_sampled_with_other_weights_are_neither_trained_nor_reported(
    policy: Path,
    tmp_path: Path,
    loads: int,
    val_data: str,
    n_rows: int,
    reported: set[str],
    trained_steps: int,
) -> None:
    server = Restarting(load_policy(policy), capacity=CAPACITY)
    server.loads = loads
    config = partial(make_config, tmp_path, policy, more=(f"data.val_data={val_data}",))
    async with serving(server) as url:
        with pytest.raises(SentinelError, match=r"received weights that differ .* restarted"):
            await run_training(config(url))
    assert len(server.loaded) == loads
    assert len(rows(tmp_path)) == n_rows
    folders = set(os.listdir(tmp_path / "reports")) if reported else set()
    assert folders == reported
    newest = find_checkpoint(tmp_path / "checkpoints", "latest")
    assert newest is not None
    assert newest.step == trained_steps


async def test_a_server_left_asleep_by_an_aborted_run_is_refused(
    policy: Path, tmp_path: Path
) -> None:
    server = make_stale_server(policy, sleep_mode=True)
    server.asleep = [*MEMORY]
    async with serving(server) as url:
        with pytest.raises(ConfigError, match="is asleep or paused"):
            async with open_inference_client(make_config(tmp_path, policy, url), None):
                pass


async def test_a_server_with_a_model_of_another_size_is_refused(
    policy: Path, tmp_path: Path
) -> None:
    another = ("trainer.policy.model.path=tiny", "trainer.policy.model_config_kwargs={}")
    async with serving(make_stale_server(policy)) as url:
        with pytest.raises(ConfigError, match=r"num_hidden_layers=1, but the learner's has \d+"):
            await run_training(make_config(tmp_path, policy, url, more=another))


async def test_an_untrainable_server_is_an_error_before_the_first_row(
    policy: Path, tmp_path: Path
) -> None:
    async with serving(make_stale_server(policy, dev_mode=False)) as url:
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            await run_training(make_config(tmp_path, policy, url))
    assert not (tmp_path / "metrics.jsonl").exists()
