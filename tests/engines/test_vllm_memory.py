"""When vLLM's memory sleeps and wakes, and how its fused weights are read back; a CPU has no sleep."""

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
from skyfleet.models.weights import bit_sums


class Calls:
    """In place of vLLM: keeps what it was told, in order."""

    def __init__(self, *, fails: str = "", errored: bool = False) -> None:
        self.told: list[str] = []
        self._fails, self.errored = fails, errored

    def _hear(self, what: str) -> None:
        self.told.append(what)
        if self._fails and what.startswith(self._fails):
            raise RuntimeError("no such weight\nand a trace")

    async def generate(self, prompt: object, asked: object, request_id: str) -> AsyncIterator[None]:
        self._hear("generate")
        yield None

    async def sleep(self, level: int, mode: str) -> None:
        self._hear(f"sleep {level} {mode}")

    async def wake_up(self, tags: list[str]) -> None:
        self._hear(f"wake {' '.join(tags)}")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._hear(f"pause {mode} {clear_cache}")

    async def resume_generation(self) -> None:
        self._hear("resume")

    async def reset_prefix_cache(self) -> None:
        self._hear("reset")

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[None]:
        self._hear(method)
        return [None]


def engine(calls: Calls, *, sleep_level: Any) -> VllmEngine:
    settings = VllmSettings(max_model_len=64, sleep_level=sleep_level)
    return VllmEngine(calls, settings, decode_text=str)


async def test_weights_that_come_in_sleep_wake_nothing_but_weights() -> None:
    calls = Calls()
    sleeper = engine(calls, sleep_level=2)
    await sleeper.sleep()
    await sleeper.load("skyfleet_load_file", "f", policy_version=3)
    await sleeper.wake()
    await sleeper.wake()
    assert calls.told == ["sleep 2 wait", "wake weights", "skyfleet_load_file", "wake kv_cache"]
    assert sleeper.policy_version == 3


async def test_weights_that_come_awake_hold_turns_and_drop_the_cache() -> None:
    calls = Calls()
    await engine(calls, sleep_level=0).load("skyfleet_load_file", "f", policy_version=3)
    assert calls.told == ["pause keep True", "skyfleet_load_file", "resume"]


async def test_without_sleep_mode_only_the_cache_goes() -> None:
    calls = Calls()
    sleeper = engine(calls, sleep_level=0)
    await sleeper.sleep()
    await sleeper.wake()
    assert calls.told == ["reset"]


async def test_nobody_speaks_with_weights_that_were_dropped() -> None:
    sleeper = engine(Calls(), sleep_level=2)
    await sleeper.sleep()
    await sleeper.wake()
    with pytest.raises(
        ConfigError, match=r"^vLLM dropped its weights to sleep, and none have come"
    ):
        await sleeper.generate([1], SamplingParams(max_generate_length=4), session="s")


async def test_weights_that_a_worker_refuses_stop_the_run_in_one_sentence() -> None:
    calls = Calls(fails="skyfleet")
    with pytest.raises(ModelError, match=r"to skyfleet_load_file and failed: RuntimeError: no suc"):
        await engine(calls, sleep_level=0).load("skyfleet_load_file", "f", policy_version=3)
    assert calls.told[-1] == "resume"


@pytest.mark.parametrize("fails", ["sleep", "reset", "wake", "pause", "resume"])
async def test_whatever_vllm_fails_at_besides_turns_stops_the_run(fails: str) -> None:
    sleeper = engine(Calls(fails=fails), sleep_level=2 if fails in ("sleep", "wake") else 0)

    async def step() -> None:
        await sleeper.sleep()
        await sleeper.load("skyfleet_load_file", "f", policy_version=3)

    with pytest.raises(ModelError, match=r"^vLLM was told to .* and failed: RuntimeError: no such"):
        await step()


@pytest.mark.parametrize(("errored", "kind"), [(False, EngineError), (True, ModelError)])
async def test_a_failed_turn_is_its_episodes_matter_unless_vllm_has_died(
    errored: bool, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "_prompt", lambda *_: None)
    monkeypatch.setattr(vllm_engine, "_asked", lambda *_: None)
    policy_model = engine(Calls(fails="generate", errored=errored), sleep_level=0)
    with pytest.raises(kind, match=r"vLLM: RuntimeError: no such weight"):
        await policy_model.generate([1], SamplingParams(max_generate_length=4), session="s")


class Fused(nn.Module):
    """Weights as vLLM holds them: projections in one tensor, a padded vocabulary, one packed away."""

    def __init__(self, k: Tensor, v: Tensor, embedding: Tensor) -> None:
        super().__init__()
        self.kv_proj, self.embed, self.o_proj = nn.Module(), nn.Module(), nn.Module()
        self.kv_proj.weight = nn.Parameter(torch.cat([k, v]))
        self.embed.weight = nn.Parameter(torch.cat([embedding, torch.zeros(3, 4)]))
        self.o_proj.weight = nn.Parameter(torch.empty(0))


def door_to(k: Tensor, v: Tensor, embedding: Tensor) -> WeightUpdateExtension:
    model = nn.Module()
    model.layer = Fused(k, v, embedding)
    model.packed_modules_mapping = {"kv_proj": ["k_proj", "v_proj"]}  # type: ignore[assignment]
    door = WeightUpdateExtension()
    door.model_runner = SimpleNamespace(get_model=lambda: model)
    return door


def test_each_weight_is_read_back_from_where_vllm_holds_it() -> None:
    torch.manual_seed(0)
    k, v, embedding = torch.randn(2, 4), torch.randn(6, 4), torch.randn(5, 4)
    shapes = {
        "layer.k_proj.weight": [2, 4],
        "layer.v_proj.weight": [6, 4],
        "layer.embed.weight": [5, 4],
        "layer.o_proj.weight": [4, 4],  # packed away
        "lm_head.weight": [5, 4],  # tied
    }
    assert door_to(k, v, embedding).skyfleet_sums(shapes)["held"] == {
        "layer.k_proj.weight": bit_sums(k).tolist(),
        "layer.v_proj.weight": bit_sums(v).tolist(),
        "layer.embed.weight": bit_sums(embedding).tolist(),
    }


def test_what_lies_elsewhere_in_a_fused_tensor_is_not_taken_for_a_weight() -> None:
    """As one of two GPUs holds it: half of each, and together as many rows as one of them."""
    k, v = torch.randn(4, 4), torch.randn(4, 4)
    shapes = {"layer.k_proj.weight": [4, 4], "layer.v_proj.weight": [4, 4]}
    assert door_to(k[:2], v[:2], torch.randn(5, 4)).skyfleet_sums(shapes)["held"] == {}


def test_what_vllm_was_given_is_summed_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a load that breaks off, no more than came; nothing of the load before."""
    one, other, taken = torch.randn(2, 4), torch.randn(3), list[str]()

    def replace(door: WeightUpdateExtension, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, _ in weights:
            taken.append(name)
            if name == "breaks":
                raise RuntimeError(name)

    monkeypatch.setattr(vllm_worker, "_replace", replace)
    door = door_to(torch.randn(2, 4), torch.randn(2, 4), torch.randn(5, 4))
    door._skyfleet_take([("a", one), ("b", other)])
    assert door.skyfleet_sums({})["given"] == {
        "a": bit_sums(one).tolist(),
        "b": bit_sums(other).tolist(),
    }
    with pytest.raises(RuntimeError, match="breaks"):
        door._skyfleet_take([("breaks", other), ("a", one)])
    assert door.skyfleet_sums({})["given"].keys() == {"breaks"}
    assert taken == ["a", "b", "breaks"]
