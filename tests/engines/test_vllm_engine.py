"""VllmEngine fulfils the engine contract and loads the learner's weights; needs vLLM on a CPU.

All tests share one engine, because it starts slowly; the last test kills it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import pytest_asyncio
from tests.engines.contract import LONG, PROMPT, SAMPLING, EngineContract
from tests.fakes.small_models import logprobs_of
from tests.fakes.tiny_policy import CAPACITY, TinyPolicy
from tests.fakes.wide_policy import LearnerOf, moved, wide_policy

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.chat_engine import RenderedChat
from skyfleet.engines.engine import Engine
from skyfleet.engines.vllm_controller import VllmSettings
from skyfleet.engines.vllm_engine import VllmEngine, open_vllm_engine
from skyfleet.errors import ConfigError, ModelError, SentinelError
from skyfleet.models.loading import LoadedModel, save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="no vllm here: pip install -e '.[vllm]'"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # vLLM's own, and there are many
]

LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object"})
READ = list(range(20, 276))
"""Two of the blocks that vLLM caches on a CPU."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    policy_model, folder = wide_policy(), tmp_path_factory.mktemp("model")
    save_model(
        LoadedModel(module=policy_model.decoder.module, tokenizer=policy_model.tokenizer), folder
    )
    settings = VllmSettings(
        max_model_len=CAPACITY,
        model_dtype="float32",
        enforce_eager=True,
        max_num_seqs=16,
        engine_init_kwargs={"kv_cache_memory_bytes": 2**28},
    )
    engine = await open_vllm_engine(str(folder), settings, decode_text=policy_model.renderer.text)
    yield engine
    await engine.close()
    with warnings.catch_warnings(action="ignore"):
        gc.collect()  # vLLM leaves a socket's context open, which warns


def unfinished(engine: VllmEngine) -> int:
    n: int = engine._llm.output_processor.get_num_unfinished_requests()
    return n


async def begun(engine: VllmEngine) -> None:
    while unfinished(engine) == 0:  # noqa: ASYNC110 - vLLM has no event for it
        await asyncio.sleep(0.001)


async def cached_tokens(engine: VllmEngine, version: int) -> int:
    """How many of READ's are cached under a version of the policy."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    prompt = tokens_input([*READ, 20], cache_salt=str(version))
    outputs = engine._llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), "probe")
    cached = [output.num_cached_tokens async for output in outputs]
    n: int = cached[-1]
    return n


class TestVllm(EngineContract):
    tolerance = 1e-4
    hottest = 2.0

    @property
    def policy_model(self) -> TinyPolicy:
        return wide_policy()

    @pytest.fixture(autouse=True)
    def _given(self, vllm: VllmEngine) -> None:
        self.vllm, self.behind = vllm, []

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Engine]:
        self.vllm.policy_version = 0
        await self.vllm.sleep()
        yield self.vllm

    async def test_a_turn_prefills_only_new_tokens(self) -> None:
        """In whole blocks."""
        async with self.opened() as engine:
            assert await cached_tokens(self.vllm, 0) == 0
            await engine.generate(READ, SAMPLING, session="s")
            assert await cached_tokens(self.vllm, 0) == len(READ)

    async def test_a_cancelled_turn_leaves_nothing_running_and_a_usable_engine(self) -> None:
        async with self.opened() as engine:
            turn = asyncio.create_task(engine.generate(PROMPT, LONG, session="gone"))
            await begun(self.vllm)
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
            assert unfinished(self.vllm) == 0
            completion = await engine.generate(PROMPT, SAMPLING, session="s")
            assert len(completion.token_ids) == 12

    async def test_a_turn_ended_by_a_stop_string_leaves_nothing_running(self) -> None:
        async with self.opened() as engine:
            free = (await engine.generate(PROMPT, LONG, session="s")).token_ids
            stop = self.policy_model.renderer.text(free[:1])
            completion = await engine.generate(PROMPT, replace(LONG, stop=(stop,)), session="s")
        assert (completion.token_ids, completion.finish) == (free[:1], "stop")
        assert unfinished(self.vllm) == 0

    async def test_a_greedy_turn_takes_the_most_likely_tokens_with_logprob_zero(self) -> None:
        greedy = replace(SAMPLING, temperature=0.0)
        async with self.opened() as engine:
            completion = await engine.generate(PROMPT, greedy, session="s")
        expected = await self.policy_model.engine().generate(PROMPT, greedy, session="s")
        assert (completion.token_ids, completion.logprobs) == (
            expected.token_ids,
            expected.logprobs,
        )


async def test_the_prefix_cache_of_old_weights_is_not_used(vllm: VllmEngine) -> None:
    await vllm.generate(READ, SAMPLING, session="s")
    version = vllm.policy_version
    assert await cached_tokens(vllm, version) == len(READ)
    assert await cached_tokens(vllm, version + 1) == 0


async def test_a_push_changes_samples_and_logprobs_to_the_new_weights(
    vllm: VllmEngine,
) -> None:
    before = await vllm.generate(PROMPT, SAMPLING, session="s")
    changed = moved(0.05)
    assert await LearnerOf(changed, 3).push(vllm) == 3
    after = await vllm.generate(PROMPT, SAMPLING, session="s")
    assert after.token_ids != before.token_ids
    assert after.policy_version == 3
    expected = logprobs_of(changed, [*PROMPT, *after.token_ids], 12, temperature=0.8)
    assert after.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    await LearnerOf(wide_policy().decoder, 4).push(vllm)
    again = await vllm.generate(PROMPT, SAMPLING, session="s")
    assert again.token_ids == before.token_ids
    assert again.logprobs == pytest.approx(before.logprobs, abs=1e-5)


async def test_a_running_turn_continues_with_the_new_weights(vllm: VllmEngine) -> None:
    vllm.policy_version = 5
    turn = asyncio.create_task(vllm.generate(PROMPT, LONG, session="long"))
    await begun(vllm)
    await LearnerOf(moved(0.05), 6).push(vllm)
    assert not turn.done()
    completion = await turn
    assert (len(completion.token_ids), completion.finish, completion.policy_version) == (
        400,
        "length",
        5,
    )
    last = logprobs_of(moved(0.05), [*PROMPT, *completion.token_ids], 50)
    assert completion.logprobs[-50:] == pytest.approx(last.tolist(), abs=1e-4)
    await LearnerOf(wide_policy().decoder, 7).push(vllm)


async def test_weights_that_differ_from_the_learners_are_detected(
    vllm: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def do_nothing(*_: object, policy_version: int) -> None: ...

    monkeypatch.setattr(VllmEngine, "update_weights", do_nothing)
    with pytest.raises(
        SentinelError, match=r"received weights that differ from the learner's: 24 of 24"
    ):
        await LearnerOf(moved(0.05), 8).push(vllm)


async def test_a_conversation_with_tools_has_exact_tokens(vllm: VllmEngine) -> None:
    renderer = wide_policy().renderer
    chat = RenderedChat(vllm, renderer, max_input_length=CAPACITY)
    talk = [Message(role="user", content="Where?")]
    completion = await chat.chat(talk, [LOOK], SAMPLING, session="c")
    assert list(completion.prompt_token_ids) == renderer.render_prompt(talk, [LOOK])
    so_far = [*completion.prompt_token_ids, *completion.completion.token_ids]
    expected = logprobs_of(wide_policy().decoder, so_far, 12, temperature=0.8)
    assert completion.completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    talk += [completion.message, Message(role="user", content="There?")]
    more = await chat.chat(talk, [LOOK], SAMPLING, session="c")
    assert list(more.prompt_token_ids[: len(so_far)]) == so_far


async def test_sampling_that_vllm_rejects_is_a_config_error(vllm: VllmEngine) -> None:
    with pytest.raises(ConfigError, match=r"vLLM rejects them: temperature"):
        await vllm.generate(PROMPT, replace(SAMPLING, temperature=-1.0), session="s")


async def test_a_dead_engine_stops_the_run(
    vllm: VllmEngine, caplog: pytest.LogCaptureFixture
) -> None:
    turn = asyncio.create_task(vllm.generate(PROMPT, LONG, session="s"))
    await begun(vllm)
    resources: Any = vllm._llm.engine_core.resources
    resources.engine_manager.processes[0].kill()
    with pytest.raises(ModelError, match=r"vLLM is dead: .*EngineDeadError"):
        await turn
    with pytest.raises(ModelError, match=r"^vLLM is dead; run the same command to resume from"):
        await vllm.generate(PROMPT, SAMPLING, session="s")
    caplog.clear()  # its tracebacks would keep vLLM and its open sockets alive
