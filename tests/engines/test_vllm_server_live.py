"""vLLM's own server fulfils the engine contract and is trained over HTTP; needs vLLM on a CPU.

All tests share one server, because it starts slowly; the last test kills it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.engines.contract import LONG, PROMPT, SAMPLING, EngineContract
from tests.fakes.small_models import logprobs_of
from tests.fakes.tiny_policy import CAPACITY, MODEL, TinyPolicy
from tests.fakes.wide_policy import LearnerOf, moved, wide_policy

from skyfleet.chat.transcript import Completion
from skyfleet.engines import http_client
from skyfleet.engines.engine import Engine
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.vllm_controller import WORKER_EXTENSION
from skyfleet.engines.vllm_routes import VllmRoutes
from skyfleet.engines.vllm_server import VllmServer, open_vllm_server
from skyfleet.errors import ConfigError, ModelError, SentinelError
from skyfleet.models.loading import LoadedModel, save_model
from skyfleet.models.weights import read_model_sizes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="no vllm here: pip install -e '.[vllm]'"),
    pytest.mark.asyncio(loop_scope="module"),
]

READ = [20 + i % 240 for i in range(256)]
"""Two of the blocks that vLLM caches on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A real vLLM server, and the engine that uses it."""

    process: Process
    engine: VllmServer
    client: httpx.AsyncClient
    routes: VllmRoutes

    async def counted(self, metric: str) -> float:
        """A Prometheus counter of vLLM."""
        page = (await self.client.get("metrics")).text
        return sum(
            float(n) for n in re.findall(rf"^vllm:{metric}{{.*}} (\S+)$", page, re.MULTILINE)
        )

    async def begun(self) -> asyncio.Task[Completion]:
        """Start a turn of about a second; on a busy machine it may end before this returns."""
        turn = asyncio.create_task(self.engine.generate(PROMPT, LONG, session="long"))
        await asyncio.sleep(0.1)
        return turn


def sizes() -> dict[str, Any]:
    return read_model_sizes(wide_policy().decoder.module.config)


def skip_if_over(turn: asyncio.Task[Completion]) -> None:
    if turn.done():
        pytest.skip("the machine is busy: the turn was over before it could be interrupted")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Started]:
    policy_model, folder = wide_policy(), tmp_path_factory.mktemp("model")
    save_model(
        LoadedModel(module=policy_model.decoder.module, tokenizer=policy_model.tokenizer), folder
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (
        *("--model", str(folder), "--served-model-name", MODEL, "--port", str(port)),
        *("--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", str(CAPACITY)),
        *("--enforce-eager", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(2**28)),
        *("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", WORKER_EXTENSION),
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words),
        env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    async with AsyncExitStack() as opened:
        opened.push_async_callback(ended, process)
        routes = await opened.enter_async_context(VllmRoutes(url))
        async with asyncio.timeout(300):
            while not await routes.is_alive():
                assert process.returncode is None
                await asyncio.sleep(0.5)
        inner = OpenAIEngine(f"{url}/v1", model=MODEL, tries=2)
        await opened.enter_async_context(inner)
        client = await opened.enter_async_context(httpx.AsyncClient(base_url=url))
        engine = await open_vllm_server(inner, routes, may_sleep=True, sizes=sizes())
        yield Started(process=process, engine=engine, client=client, routes=routes)


async def ended(process: Process) -> None:
    """Kill the server with its workers, which would outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


class TestVllmServer(EngineContract):
    tolerance = 1e-4
    hottest = 2.0

    @property
    def policy_model(self) -> TinyPolicy:
        return wide_policy()

    @pytest.fixture(autouse=True)
    def _given(self, started: Started) -> None:
        self.started, self.behind = started, []

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Engine]:
        engine = self.started.engine
        engine.policy_version = 0
        await engine.sleep()
        yield engine

    async def test_a_turn_prefills_only_new_tokens(self) -> None:
        """In whole blocks."""
        async with self.opened() as engine:
            before = await self.started.counted("prefix_cache_hits_total")
            await engine.generate(READ, SAMPLING, session="s")
            assert await self.started.counted("prefix_cache_hits_total") == before
            await engine.generate([*READ, 20], SAMPLING, session="s")
            assert await self.started.counted("prefix_cache_hits_total") == before + len(READ)

    async def test_a_cancelled_turn_leaves_nothing_running_and_a_usable_engine(self) -> None:
        async with self.opened() as engine:
            turn = await self.started.begun()
            skip_if_over(turn)
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
            assert len((await engine.generate(PROMPT, SAMPLING, session="s")).token_ids) == 12
            assert await self.started.counted("num_requests_running") == 0


async def test_the_prefix_cache_of_another_version_is_not_used(started: Started) -> None:
    await started.engine.generate(READ, SAMPLING, session="s")
    before = await started.counted("prefix_cache_hits_total")
    started.engine.policy_version += 1
    await started.engine.generate([*READ, 20], SAMPLING, session="s")
    assert await started.counted("prefix_cache_hits_total") == before


async def test_a_push_changes_samples_and_logprobs_to_the_new_weights(
    started: Started,
) -> None:
    engine, changed = started.engine, moved(0.05)
    before = await engine.generate(PROMPT, SAMPLING, session="s")
    assert await LearnerOf(changed, 3).push(engine) == 3
    after = await engine.generate(PROMPT, SAMPLING, session="s")
    assert after.token_ids != before.token_ids
    assert after.policy_version == 3
    expected = logprobs_of(changed, [*PROMPT, *after.token_ids], 12, temperature=0.8)
    assert after.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    await LearnerOf(wide_policy().decoder, 4).push(engine)
    again = await engine.generate(PROMPT, SAMPLING, session="s")
    assert again.token_ids == before.token_ids


async def test_a_running_turn_continues_with_the_new_weights(started: Started) -> None:
    engine = started.engine
    engine.policy_version = 5
    turn = await started.begun()
    await LearnerOf(moved(0.05), 6).push(engine)
    overtaken = turn.done()
    completion = await turn
    await LearnerOf(wide_policy().decoder, 7).push(engine)
    assert (len(completion.token_ids), completion.finish, completion.policy_version) == (
        400,
        "length",
        5,
    )
    if overtaken:
        skip_if_over(turn)
    last = logprobs_of(moved(0.05), [*PROMPT, *completion.token_ids], 50)
    assert completion.logprobs[-50:] == pytest.approx(last.tolist(), abs=1e-4)


async def test_weights_that_differ_from_the_learners_are_detected(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def do_nothing(*_: object, policy_version: int) -> None: ...

    await LearnerOf(wide_policy().decoder, 8).push(started.engine)
    monkeypatch.setattr(VllmServer, "update_weights", do_nothing)
    # Packed for a CPU, none of the projections can be read back; there are 14 of them.
    with pytest.raises(SentinelError, match=r"http://127\S+ received .*: 14 of 24 tensors, first"):
        await LearnerOf(moved(0.05, only="_proj.weight"), 8).push(started.engine)


async def test_weights_pushed_by_another_run_are_detected(
    started: Started,
) -> None:
    learner = LearnerOf(wide_policy().decoder, 9)
    sync = learner.sync()
    await sync.push(learner, [started.engine])  # type: ignore[arg-type]
    await sync.verify([started.engine])
    await LearnerOf(moved(0.05), 9).push(started.engine)
    with pytest.raises(SentinelError, match="samples since then are not from this policy"):
        await sync.verify([started.engine])


@pytest.mark.parametrize("other", [{"num_hidden_layers": 1}, {"intermediate_size": 64}])
async def test_a_server_of_another_model_is_rejected(
    started: Started, other: dict[str, int]
) -> None:
    (sentence,) = (
        f"{name}={sizes()[name]}, but the learner's has {n}" for name, n in other.items()
    )
    async with OpenAIEngine(f"{started.routes.url}/v1", model=MODEL) as inner:
        with pytest.raises(ConfigError, match=sentence):
            await open_vllm_server(inner, started.routes, may_sleep=True, sizes=sizes() | other)


async def test_a_dead_server_stops_the_run(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "INITIAL_BACKOFF_SECONDS", 0.01)
    started.process.kill()
    await started.process.wait()
    with pytest.raises(ModelError, match=r"vLLM at http://127\S+ is dead: .* ConnectError"):
        await started.engine.generate(PROMPT, SAMPLING, session="s")
    with pytest.raises(
        ModelError, match=r"^every engine is dead \(vLLM at http://127\S+\); restart them"
    ):
        await LearnerOf(moved(0.05), 9).push(started.engine)
