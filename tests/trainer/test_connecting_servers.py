"""Connecting to configured servers: divided limits, and errors before the first turn."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tests.fakes.serving import policy_app, serving
from tests.fakes.small_runs import TRAIN, small_config
from tests.fakes.tiny_policy import DIMENSIONS

from skyfleet.config.root import RunConfig
from skyfleet.engines.factory import build_sampling_params, connect_servers
from skyfleet.engines.http_client import RetryingClient
from skyfleet.engines.servers import KEY_VARIABLE
from skyfleet.envs.registry import env_factory
from skyfleet.errors import ConfigError
from skyfleet.models.loading import LoadedModel, load_tokenizer, read_vocab_size, save_model
from skyfleet.models.tiny import build_tiny, train_tokenizer
from skyfleet.rollouts.episode import collect
from skyfleet.trainer.limits import build_limits
from skyfleet.trainer.policy_client import open_inference_client
from skyfleet.trainer.tasks import load_sources
from skyfleet.trajectories.trajectory import Ending, Trajectory

NATIVE = (
    "generator.use_native_tool_calling=true",
    "environment.skyrl_gym.tau_bench.use_native_tool_calling=true",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer([], vocab_size=300)
    module = build_tiny(tokenizer, DIMENSIONS | {"max_position_embeddings": 16_012}, seed=0)
    save_model(LoadedModel(module=module, tokenizer=tokenizer), folder)
    return folder


def local_config(model: Path, *more: str) -> RunConfig:
    return small_config(
        model / "run",
        f"trainer.policy.model.path={model}",
        "trainer.policy.model_config_kwargs={}",
        "generator.max_input_length=16000",  # each letter is one token of this model
        "generator.max_turns=2",
        *more,
    )


def remote_config(model: Path, *urls: str, more: tuple[str, ...] = ()) -> RunConfig:
    urls_override = f"generator.remote_inference_engine_urls=[{','.join(urls)}]"
    return local_config(model, "generator.backend=openai", urls_override, *more)


class Hanging:
    """Lists its models, but never answers a completion request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.n_requests = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/completions"):
            self.n_requests += 1
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await self._app(scope, receive, send)


async def run_episodes(config: RunConfig) -> list[Trajectory]:
    tasks = load_sources([TRAIN], key="data.train_data")
    async with open_inference_client(config, None) as policy_client:
        policy = policy_client.agent(
            build_sampling_params(config.generator.eval_sampling_params, seed=0)
        )
        limits = build_limits(config)
        groups = await collect(
            tasks, env_factory(config), policy, limits, n_samples=2, max_concurrent=8
        )
    return [attempt for group in groups for attempt in group.trajectories]


@pytest.mark.parametrize("native", [pytest.param((), marks=pytest.mark.exhaustive), NATIVE])
async def test_a_server_that_hangs_loses_no_episode(
    model: Path, native: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    seconds = "generator.trajectory_timeout_seconds=12"
    async with (
        policy_app(local_config(model), model, "mine", None) as app,
        serving(app) as whole,
        serving(hanging := Hanging(app)) as url,
    ):
        attempts = await run_episodes(remote_config(model, url, whole, more=(seconds, *native)))
    assert 0 < hanging.n_requests <= 4  # half of the eight first turns, and none after them
    assert [a.failure for a in attempts] == [None] * 8
    assert Ending.TIMEOUT not in {a.ending for a in attempts}
    assert "engine 0 failed, session" in caplog.text
    assert "did not respond within 3 s" in caplog.text


class OutsideVocabulary:
    """Samples the token id `token` instead of the last one of every completion."""

    def __init__(self, app: ASGIApp, token: int) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []

        async def collect_answer(message: Message) -> None:
            if message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        if scope["type"] != "http" or not scope["path"].endswith("/completions"):
            return await self._app(scope, receive, send)
        await self._app(scope, receive, collect_answer)
        answer = json.loads(b"".join(parts))
        answer["choices"][0]["token_ids"][-1] = self._token
        return await JSONResponse(answer)(scope, receive, send)


@pytest.mark.parametrize("native", [(), NATIVE])
async def test_a_token_outside_the_vocabulary_of_the_model_gives_no_grade(
    model: Path, native: tuple[str, ...]
) -> None:
    vocab_size = read_vocab_size(str(model), load_tokenizer(str(model)))
    async with (
        policy_app(local_config(model), model, "mine", None) as app,
        serving(OutsideVocabulary(app, vocab_size)) as url,
    ):
        attempts = await run_episodes(remote_config(model, url, more=native))
    assert {(a.ending, a.reward) for a in attempts} == {(Ending.FAILED, None)}
    for attempt in attempts:
        assert attempt.failure is not None
        sentence = f"token_ids contains {vocab_size}, outside the vocabulary of {vocab_size:,}"
        assert sentence in attempt.failure.detail


@pytest.mark.parametrize("padded", [None, 100, 512])
def test_the_vocabulary_is_that_of_the_model_with_its_padding(
    model: Path, tmp_path: Path, padded: int | None
) -> None:
    tokenizer = load_tokenizer(str(model))
    if padded is not None:
        saved = json.loads((model / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(saved | {"vocab_size": padded}))
    assert read_vocab_size(str(tmp_path), tokenizer) == max(len(tokenizer), padded or 0)


async def connect(config: RunConfig) -> list[Any]:
    async with AsyncExitStack() as stack:
        engines, chats = await connect_servers(config, stack, vocab_size=2048)
        return [*engines, *chats]


async def test_connections_and_the_episode_timeout_are_divided_among_servers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    def record_settings(self: RetryingClient, *args: Any, **settings: Any) -> None:
        made.append(settings)
        original_init(self, *args, **settings)

    original_init = RetryingClient.__init__
    monkeypatch.setattr(RetryingClient, "__init__", record_settings)
    async with (
        policy_app(local_config(model), model, "mine", None) as app,
        serving(app) as one,
        serving(app) as two,
    ):
        limits = ("generator.max_num_seqs=1024", "generator.trajectory_timeout_seconds=100")
        await connect(remote_config(model, one, more=limits))
        await connect(remote_config(model, one, two, more=limits))
        await connect(
            remote_config(model, one, two, more=("generator.trajectory_timeout_seconds=0",))
        )
    settings = [(s["max_concurrent"], s["tries"], s["timeout_seconds"]) for s in made]
    assert settings[:2] == [(512, 8, 900)] * 2
    assert settings[2:6] == [(256, 3, 25)] * 4
    assert {seconds for _, _, seconds in settings[6:]} == {900}


async def test_a_server_with_a_shorter_context_is_refused(model: Path) -> None:
    short = local_config(model, "generator.max_input_length=15000")
    async with policy_app(short, model, "mine", None) as app, serving(app) as url:
        with pytest.raises(ConfigError, match=r"supports 15012 tokens, but generator.*=16012"):
            await connect(remote_config(model, url))


async def test_an_api_key_that_no_header_can_carry_is_refused_before_any_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "schlüssel")
    with pytest.raises(ConfigError, match=r"^OPENAI_API_KEY contains"):
        await connect(remote_config(model, "127.0.0.1:9"))


@pytest.mark.parametrize(
    "setting",
    ["tool_call_parser=pythonic", "chat_template.name_or_path=qwen3_without_thinking"],
)
async def test_renderer_settings_are_refused_if_the_server_renders(
    model: Path, setting: str
) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^generator\.{key}=.*and set generator\.{key}=null"):
        await connect(remote_config(model, "127.0.0.1:9", more=(f"generator.{setting}", *NATIVE)))
    with pytest.raises(ConfigError, match="does not respond"):
        await connect(remote_config(model, "127.0.0.1:9", more=(f"generator.{setting}",)))


async def test_one_configuration_serves_and_evaluates_with_template_kwargs(model: Path) -> None:
    kwargs = "generator.chat_template_kwargs={enable_thinking: false}"
    async with (
        policy_app(local_config(model, kwargs), model, "mine", None) as app,
        serving(app) as url,
    ):
        attempts = await asyncio.wait_for(
            run_episodes(remote_config(model, url, more=(kwargs, *NATIVE))), 60
        )
    assert {a.failure for a in attempts} == {None}
