"""One configuration samples and trains on the same tokens with every engine backend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.fakes.serving import nothing_left, policy_app, serving
from tests.fakes.small_runs import TRAIN, rows, small_config

from skyfleet.chat.message import Message
from skyfleet.config.root import RunConfig
from skyfleet.engines import http_client
from skyfleet.engines.factory import build_sampling_params
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation
from skyfleet.envs.registry import env_factory
from skyfleet.errors import ConfigError
from skyfleet.rollouts.episode import collect
from skyfleet.rollouts.native_tool_calling import NativeToolConversation
from skyfleet.trainer.limits import build_limits
from skyfleet.trainer.policy_client import open_inference_client
from skyfleet.trainer.tasks import load_sources
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.trajectory import Trajectory

NATIVE = (
    "generator.use_native_tool_calling=true",
    "environment.skyrl_gym.tau_bench.use_native_tool_calling=true",
)
SAMPLED = (
    "generator.eval_sampling_params.temperature=1",
    "generator.eval_sampling_params.stop=[a,e]",
)
SHORT = ("data.val_data=[]", "trainer.max_training_steps=1", "trainer.warm_start.steps=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a one-step run, with its saved policy."""
    folder = tmp_path_factory.mktemp("trained")
    asyncio.run(run_training(small_config(folder, *SHORT)))
    return folder


def policy_folder(run: Path) -> Path:
    return run / "checkpoints/global_step_1/policy"


def remote_config(run: Path, *urls: str, more: Sequence[str] = ()) -> RunConfig:
    return small_config(
        run,
        "generator.backend=openai",
        f"generator.remote_inference_engine_urls=[{','.join(urls)}]",
        f"trainer.policy.model.path={policy_folder(run)}",
        "trainer.policy.model_config_kwargs={}",
        *more,
    )


async def run_episodes(config: RunConfig, folder: Path | None = None) -> list[Trajectory]:
    """Run each task once; decoding is greedy by default, so equal weights give equal tokens."""
    tasks = load_sources([TRAIN], key="data.train_data")
    async with open_inference_client(config, folder) as policy_client:
        sampling = build_sampling_params(config.generator.eval_sampling_params, seed=0)
        groups = await collect(
            tasks,
            env_factory(config),
            policy_client.agent(sampling),
            build_limits(config),
            n_samples=1,
            max_concurrent=8,
        )
    return [attempt for group in groups for attempt in group.trajectories]


def tokens(attempts: Sequence[Trajectory]) -> list[list[list[int]]]:
    """Up to the last sampled token: only a token conversation appends the observation after it."""
    return [
        [list(t.token_ids)[: len(t) - list(t.loss_mask)[::-1].index(True)] for t in a.transcripts]
        for a in attempts
    ]


async def test_native_tool_calling_trains_on_the_same_tokens(trained: Path, tmp_path: Path) -> None:
    await run_training(small_config(tmp_path, *SHORT, *NATIVE))
    logged = [
        [{k: v for k, v in row.items() if "timing" not in k} for row in rows(folder)]
        for folder in (trained, tmp_path)
    ]
    assert logged[0] == logged[1]
    assert logged[0][-1]["trainer/global_step"] == 1


@pytest.mark.parametrize("flags", [(), NATIVE[:1], NATIVE[1:], NATIVE])
async def test_native_tool_calling_needs_the_generator_flag_and_the_environment_flag(
    trained: Path, flags: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    observation = Observation(messages=(Message(role="user", content="Where?"),))
    (task, *_) = load_sources([TRAIN], key="data.train_data")
    async with open_inference_client(
        small_config(trained, *flags), policy_folder(trained)
    ) as policy_client:
        start = policy_client.agent(SamplingParams(max_generate_length=4))
        native = isinstance(start(task, observation, "s"), NativeToolConversation)
    assert native == (len(flags) == 2)
    assert ("has no effect while" in caplog.text) == (len(flags) == 1)


async def test_skyfleet_serve_gives_the_same_tokens_as_the_in_process_engine(trained: Path) -> None:
    here = await run_episodes(small_config(trained), policy_folder(trained))
    async with (
        nothing_left(),
        policy_app(small_config(trained), policy_folder(trained), "mine", None) as app,
        serving(app) as url,
    ):
        by_tokens = await run_episodes(remote_config(trained, url))
        by_chat = await run_episodes(remote_config(trained, url, more=NATIVE))
    assert tokens(by_tokens) == tokens(here)
    assert tokens(by_chat) == tokens(here)
    assert [a.ending for a in by_chat] == [a.ending for a in here]
    assert {len(a.transcripts) for a in here} == {1}


async def test_every_request_carries_the_api_key(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "open")
    async with (
        policy_app(small_config(trained), policy_folder(trained), "mine", "open") as app,
        serving(app) as url,
    ):
        for flags in ((), NATIVE):
            attempts = await run_episodes(remote_config(trained, url, more=flags))
            assert [attempt.failure for attempt in attempts] == [None] * 4


class Dying:
    """Serves `turns` requests, then hangs on the next one until the server is killed."""

    def __init__(self, app: ASGIApp, *, turns: int) -> None:
        self._app, self._left, self.hangs = app, turns, asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/completions"):
            self._left -= 1
            if self._left < 0:
                self.hangs.set()
                await asyncio.Event().wait()
        await self._app(scope, receive, send)


async def test_a_server_killed_mid_episode_loses_no_episode(
    trained: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "INITIAL_BACKOFF_SECONDS", 0.01)
    async with (
        policy_app(small_config(trained), policy_folder(trained), "mine", None) as app,
        serving(app) as surviving,
    ):
        expected = await run_episodes(remote_config(trained, surviving, more=SAMPLED))
        dying = Dying(app, turns=3)
        async with serving(dying) as url:
            running = asyncio.create_task(
                run_episodes(remote_config(trained, url, surviving, more=SAMPLED))
            )
            await dying.hangs.wait()
        attempts = await running
    assert "engine 0 failed, session" in caplog.text
    assert [attempt.failure for attempt in attempts] == [None] * 4
    assert tokens(attempts) == tokens(expected)
    assert sum(len(attempt.turns) for attempt in attempts) > 8


async def test_the_openai_backend_cannot_be_trained(trained: Path, tmp_path: Path) -> None:
    config = remote_config(trained, "127.0.0.1:9", more=[f"trainer.run_path={tmp_path}"])
    with pytest.raises(ConfigError, match=r"^generator\.backend='openai' is inference-only"):
        await run_training(config)


async def test_a_tiny_policy_on_a_server_needs_a_checkpoint_path(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, "generator.backend=openai", "generator.remote_inference_engine_urls=127.0.0.1:9"
    )
    with pytest.raises(ConfigError, match="a tiny policy has its own vocabulary; set the"):
        await run_episodes(config)
