"""Sleep, wake and weight updates of vLLM against a fake, and prefill back its fused weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skyfleet.engines import vllm_engine, vllm_worker
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.engines.vllm_controller import VllmSettings
from skyfleet.engines.vllm_engine import VllmEngine
from skyfleet.engines.vllm_worker import WeightUpdateExtension
from skyfleet.errors import ConfigError, EngineError, ModelError
from skyfleet.models.weights import weight_checksum


class Calls:
    """Stands in for vLLM and records its calls in order."""

    def __init__(self, *, fails: str = "", errored: bool = False) -> None:
        self.calls: list[str] = []
        self._fails, self.errored = fails, errored

    def _record(self, what: str) -> None:
        self.calls.append(what)
        if self._fails and what.startswith(self._fails):
            raise RuntimeError("no such weight\nand a trace")

    async def generate(self, prompt: object, asked: object, request_id: str) -> AsyncIterator[None]:
        self._record("generate")
        yield None

    async def sleep(self, level: int, mode: str) -> None:
        self._record(f"sleep {level} {mode}")

    async def wake_up(self, tags: list[str]) -> None:
        self._record(f"wake {' '.join(tags)}")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._record(f"pause {mode} {clear_cache}")

    async def resume_generation(self) -> None:
        self._record("resume")

    async def reset_prefix_cache(self) -> None:
        self._record("reset")

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[None]:
        self._record(method)
        return [None]


def engine(calls: Calls, *, sleep_level: Any) -> VllmEngine:
    settings = VllmSettings(max_model_len=64, sleep_level=sleep_level)
    return VllmEngine(calls, settings, decode_text=str)


async def test_a_weight_update_while_asleep_wakes_only_the_weights() -> None:
    calls = Calls()
    sleeper = engine(calls, sleep_level=2)
    await sleeper.sleep()
    await sleeper.update_weights("skyfleet_load_file", "f", policy_version=3)
    await sleeper.wake()
    await sleeper.wake()
    assert calls.calls == ["sleep 2 wait", "wake weights", "skyfleet_load_file", "wake kv_cache"]
    assert sleeper.policy_version == 3


async def test_a_weight_update_while_awake_pauses_turns_and_drops_the_cache() -> None:
    calls = Calls()
    await engine(calls, sleep_level=0).update_weights("skyfleet_load_file", "f", policy_version=3)
    assert calls.calls == ["pause keep True", "skyfleet_load_file", "resume"]


async def test_without_sleep_mode_only_the_cache_is_dropped() -> None:
    calls = Calls()
    sleeper = engine(calls, sleep_level=0)
    await sleeper.sleep()
    await sleeper.wake()
    assert calls.calls == ["reset"]


async def test_dropped_weights_must_be_pushed_before_generating() -> None:
    sleeper = engine(Calls(), sleep_level=2)
    await sleeper.sleep()
    await sleeper.wake()
    with pytest.raises(ConfigError, match=r"^vLLM dropped its weights at sleep level 2"):
        await sleeper.generate([1], SamplingParams(max_generate_length=4), session="s")


async def test_a_failed_weight_update_stops_the_run_with_one_sentence() -> None:
    calls = Calls(fails="skyfleet")
    with pytest.raises(ModelError, match=r"failed to run skyfleet_load_file: RuntimeError: no suc"):
        await engine(calls, sleep_level=0).update_weights(
            "skyfleet_load_file", "f", policy_version=3
        )
    assert calls.calls[-1] == "resume"


@pytest.mark.parametrize("fails", ["sleep", "reset", "wake", "pause", "resume"])
async def test_a_failed_control_call_stops_the_run(fails: str) -> None:
    sleeper = engine(Calls(fails=fails), sleep_level=2 if fails in ("sleep", "wake") else 0)

    async def step() -> None:
        await sleeper.sleep()
        await sleeper.update_weights("skyfleet_load_file", "f", policy_version=3)

    with pytest.raises(ModelError, match=r"^vLLM failed to .*: RuntimeError: no such"):
        await step()


@pytest.mark.parametrize(("errored", "kind"), [(False, EngineError), (True, ModelError)])
async def test_a_failed_turn_fails_its_episode_unless_vllm_is_dead(
    errored: bool, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "_to_vllm_prompt", lambda *_: None)
    monkeypatch.setattr(vllm_engine, "_to_vllm_params", lambda *_: None)
    policy_model = engine(Calls(fails="generate", errored=errored), sleep_level=0)
    with pytest.raises(kind, match=r"vLLM: RuntimeError: no such weight"):
        await policy_model.generate([1], SamplingParams(max_generate_length=4), session="s")


class Fused(nn.Module):
    """Weights as vLLM holds them: fused projections, a padded vocabulary, one packed tensor."""

    def __init__(self, k: Tensor, v: Tensor, embedding: Tensor) -> None:
        super().__init__()
        self.kv_proj, self.embed, self.o_proj = nn.Module(), nn.Module(), nn.Module()
        self.kv_proj.weight = nn.Parameter(torch.cat([k, v]))
        self.embed.weight = nn.Parameter(torch.cat([embedding, torch.zeros(3, 4)]))
        self.o_proj.weight = nn.Parameter(torch.empty(0))


def build_extension(k: Tensor, v: Tensor, embedding: Tensor) -> WeightUpdateExtension:
    model = nn.Module()
    model.layer = Fused(k, v, embedding)
    model.packed_modules_mapping = {"kv_proj": ["k_proj", "v_proj"]}  # type: ignore[assignment]
    extension = WeightUpdateExtension()
    extension.model_runner = SimpleNamespace(get_model=lambda: model)
    return extension


def test_each_weight_is_read_back_from_vllms_fused_tensors() -> None:
    torch.manual_seed(0)
    k, v, embedding = torch.randn(2, 4), torch.randn(6, 4), torch.randn(5, 4)
    shapes = {
        "layer.k_proj.weight": [2, 4],
        "layer.v_proj.weight": [6, 4],
        "layer.embed.weight": [5, 4],
        "layer.o_proj.weight": [4, 4],  # packed away
        "lm_head.weight": [5, 4],  # tied
    }
    assert build_extension(k, v, embedding).skyfleet_sums(shapes)["held"] == {
        "layer.k_proj.weight": weight_checksum(k).tolist(),
        "layer.v_proj.weight": weight_checksum(v).tolist(),
        "layer.embed.weight": weight_checksum(embedding).tolist(),
    }


def test_a_sharded_fused_tensor_is_not_read_back() -> None:
    """As on one of two GPUs: half of each, together as many rows as one of them."""
    k, v = torch.randn(4, 4), torch.randn(4, 4)
    shapes = {"layer.k_proj.weight": [4, 4], "layer.v_proj.weight": [4, 4]}
    assert build_extension(k[:2], v[:2], torch.randn(5, 4)).skyfleet_sums(shapes)["held"] == {}


def test_received_weights_are_checksummed_as_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted load reports only what arrived, and nothing of the load before."""
    one, other, taken = torch.randn(2, 4), torch.randn(3), list[str]()

    def replace(worker: WeightUpdateExtension, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, _ in weights:
            taken.append(name)
            if name == "breaks":
                raise RuntimeError(name)

    monkeypatch.setattr(vllm_worker, "_replace", replace)
    extension = build_extension(torch.randn(2, 4), torch.randn(2, 4), torch.randn(5, 4))
    extension._skyfleet_load([("a", one), ("b", other)])
    assert extension.skyfleet_sums({})["given"] == {
        "a": weight_checksum(one).tolist(),
        "b": weight_checksum(other).tolist(),
    }
    with pytest.raises(RuntimeError, match="breaks"):
        extension._skyfleet_load([("breaks", other), ("a", one)])
    assert extension.skyfleet_sums({})["given"].keys() == {"breaks"}
    assert taken == ["a", "b", "breaks"]
