"""An engine with weights of its own: where it loads them, when it sleeps, and what it is handed.

vLLM itself is not needed here: what stands for it loads the same folder into an engine of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.fakes import moody_world
from tests.fakes.small_runs import rows, small_config
from torch import Tensor

from skyfleet.chat.renderer import Renderer
from skyfleet.config.root import RunConfig
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.engine import Engine
from skyfleet.envs import registry
from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.learner.learner import Learner
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import load_model
from skyfleet.trainer import assemble, assemble_voice
from skyfleet.trainer.assemble_engines import vllm_settings
from skyfleet.trainer.session import run_training
from skyfleet.weight_sync import vllm

VLLM = (
    "generator.backend=vllm",
    "data.val_data=[]",
)
happened: list[str] = []


class Copied(EmbeddedEngine):
    """Weights of its own, as vLLM has them."""

    weights: dict[str, Tensor]

    async def sleep(self) -> None:
        happened.append("sleep")

    async def wake(self) -> None:
        happened.append("wake")

    async def close(self) -> None:
        happened.append("close")


async def start(
    config: RunConfig, path: str, renderer: Renderer, opened: AsyncExitStack, *, learns: bool
) -> list[Engine]:
    engines: list[Engine] = []
    for _ in range(config.generator.num_inference_engines):
        loaded = load_model(path, dtype=torch.float32, device=torch.device("cpu"), config_kwargs={})
        decoder = Decoder(loaded.module, max_positions=1100)
        engine = Copied(decoder, decode_text=renderer.text, max_num_seqs=16, capacity=1100)
        engine.weights = dict(loaded.module.named_parameters())
        opened.push_async_callback(engine.close)
        engines.append(engine)
        happened.append("start")
    return engines


class CopySync:
    def __init__(self, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._weights = weights

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        happened.append("push")
        sent = dict(self._weights())
        for engine in engines:
            assert isinstance(engine, Copied)
            assert engine.weights.keys() == sent.keys()
            for name, weight in sent.items():
                engine.weights[name].data.copy_(weight)
            engine.policy_version = learner.policy_version
        return learner.policy_version


@pytest.fixture(autouse=True)
def stands_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    happened.clear()
    monkeypatch.setattr(assemble, "check_vllm", lambda: None)
    monkeypatch.setattr(assemble_voice, "start_vllm", start)
    monkeypatch.setattr(vllm, "VllmSync", CopySync)
    monkeypatch.setitem(registry.ENV_CLASSES, "world", lambda _: moody_world.open_moody)


async def test_an_engine_that_shares_the_gpu_sleeps_while_the_learner_works(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path, *VLLM))
    assert happened == ["start", *["sleep", "push", "wake"] * 4, "close"]  # warm start, 3 steps
    # The sentinels, which would have stopped the run, saw the learner's logprobs in the engine.
    gaps = [row["policy/rollout_train_logprobs_abs_diff_mean"] for row in rows(tmp_path)[1:]]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4


async def test_apart_from_the_learner_it_stays_awake_and_several_speak_as_one(
    tmp_path: Path,
) -> None:
    apart = ("trainer.placement.colocate_all=false", "generator.num_inference_engines=2")
    await run_training(small_config(tmp_path, *VLLM, *apart))
    assert happened == ["start", "start", *["push"] * 4, "close", "close"]


async def test_what_was_saved_is_what_the_engine_goes_on_from(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path, *VLLM, "trainer.max_training_steps=2"))
    happened.clear()
    await run_training(small_config(tmp_path, *VLLM))
    assert happened == ["start", "sleep", "push", "wake", "close"]
    assert rows(tmp_path)[-1]["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-4


async def test_an_engine_is_closed_where_a_run_cannot_be_assembled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(assemble, "make_trackers", no_room)
    with pytest.raises(OSError, match="no space left"):
        await run_training(small_config(tmp_path, *VLLM))
    assert happened == ["start", "close"]


async def test_what_is_named_wrongly_is_said_before_an_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        await run_training(
            small_config(tmp_path, *VLLM, "trainer.algorithm.policy_loss_type=no_such_module:loss")
        )
    assert happened == []


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
async def test_without_vllm_its_extra_is_named_before_anything_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(assemble, "assemble_tasks", None)
    with pytest.raises(MissingExtraError, match="vllm is not installed; it comes with the extra"):
        await run_training(small_config(tmp_path, *VLLM))


def test_vllm_is_told_what_the_configuration_says(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        *VLLM,
        "generator.model_dtype=float32",
        "generator.enforce_eager=true",
        "generator.enable_prefix_caching=false",
        "generator.engine_init_kwargs={swap_space: 1}",
        "generator.gpu_memory_utilization=0.3",
    )
    settings = vllm_settings(config, learns=True)
    assert (settings.model_dtype, settings.enforce_eager) == ("float32", True)
    assert (settings.enable_prefix_caching, settings.gpu_memory_utilization) == (False, 0.3)
    assert settings.max_model_len == 1012  # 1000 of prompt, 12 of the last turn
    assert settings.engine_init_kwargs == {"swap_space": 1}
    assert settings.max_num_seqs == 16
