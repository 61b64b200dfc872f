"""Offloading to the CPU changes no number. Real moves need a GPU; the `meta` device stands in."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.fakes.samples import random_groups
from tests.fakes.small_models import logits_of, small_decoder
from tests.learner.test_single_device_learner import SETTINGS, learner
from torch import nn

from skyfleet.algorithms.kl import k3
from skyfleet.learner.optimizer import CPUOffloaded, Optimizer, OptimizerSettings
from skyfleet.models.decoder import Decoder

META = torch.device("meta")


def stepped(dtype: torch.dtype, *, offload: bool, steps: int = 2) -> tuple[nn.Parameter, Optimizer]:
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype))
    settings = OptimizerSettings(lr=0.1, offload_after_step=offload)
    optimizer = Optimizer([weight], settings)
    for _ in range(steps):
        weight.grad = torch.tensor([0.5, 0.25])
        optimizer.apply()
    return weight, optimizer


def test_moments_move_and_weights_stay() -> None:
    weight, optimizer = stepped(torch.float32, offload=False)
    optimizer.move_to(META)
    moments = [
        x for kept in optimizer.state_dict()["adam"]["state"].values() for x in kept.values()
    ]
    assert len(moments) == 3  # both moments and the count
    assert all(x.is_meta for x in moments)
    assert not weight.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_takes_the_same_steps(dtype: torch.dtype) -> None:
    stayed, _ = stepped(dtype, offload=False, steps=4)
    waited, optimizer = stepped(dtype, offload=True)
    resumed = Optimizer([waited], OptimizerSettings(lr=0.1, offload_after_step=True))
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    for _ in range(2):
        waited.grad = torch.tensor([0.5, 0.25])
        resumed.apply()
    assert torch.equal(stayed, waited)


async def test_a_checkpoint_is_loaded_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = learner(small_decoder())
    await student.step(random_groups(2))
    student.save(tmp_path)
    resumed = learner(small_decoder(seed=2))
    # What went to this device would be lost.
    monkeypatch.setattr(Decoder, "device", META)
    resumed.load(tmp_path)
    assert resumed.policy_version == 1


def test_offloaded_weights_hold_no_memory_outside_on_device() -> None:
    decoder, policy = small_decoder(seed=2), small_decoder()
    weights = list(decoder.module.parameters())
    before = [weight.detach().clone() for weight in weights]
    view = weights[0][1:3]
    offloaded = CPUOffloaded(decoder.module, beside=policy.module)
    held = [weight.untyped_storage().nbytes() for weight in weights]
    assert held == [0] * len(weights)
    with offloaded.on_device():
        assert all(map(torch.equal, weights, before))
        assert torch.equal(view, before[0][1:3])
    with pytest.raises(ValueError, match="broken"), offloaded.on_device():
        raise ValueError("broken")
    assert weights[0].untyped_storage().nbytes() == 0


def test_weights_shared_with_the_policy_are_not_offloaded() -> None:
    decoder = small_decoder()
    adapted = small_decoder(seed=2)
    adapted.module.load_state_dict(decoder.module.state_dict(), assign=True)
    CPUOffloaded(adapted.module, beside=decoder.module)
    assert all(p.untyped_storage().nbytes() for p in decoder.module.parameters())


async def test_an_offloaded_reference_gives_the_same_numbers() -> None:
    samples, reports = random_groups(2), []
    for offload in (False, True):
        settings = replace(SETTINGS, kl=k3, kl_loss_coef=0.5, offload_reference=offload)
        student = learner(small_decoder(), settings, make_reference=lambda: small_decoder(seed=2))
        reports.append([await student.step(samples) for _ in range(2)])
    assert reports[0] == reports[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_offloaded_moments_give_the_same_numbers(dtype: torch.dtype) -> None:
    weights = []
    for offload in (False, True):
        weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype, device="cuda"))
        settings = OptimizerSettings(lr=0.1, offload_after_step=offload)
        optimizer = Optimizer([weight], settings)
        for _ in range(3):
            weight.grad = torch.tensor([0.5, 0.25], device="cuda")
            optimizer.apply()
        state = optimizer.state_dict()
        moments = [x for kept in state["adam"]["state"].values() for x in kept.values()]
        assert {x.device.type for x in [*moments, *state["masters"]]} == (
            {"cpu"} if offload else {"cuda"}
        )
        weights.append(weight)
    assert torch.equal(*weights)


@pytest.mark.gpu
def test_on_a_gpu_an_offloaded_decoder_frees_memory_and_gives_the_same_logits() -> None:
    decoder = small_decoder(seed=2)
    decoder = Decoder(decoder.module.cuda(), max_positions=256)
    tokens = list(range(1, 20))
    with torch.no_grad():
        before = logits_of(decoder, tokens)
    n_bytes = torch.cuda.memory_allocated()
    offloaded = CPUOffloaded(decoder.module, beside=small_decoder().module)
    assert torch.cuda.memory_allocated() < n_bytes
    with offloaded.on_device(), torch.no_grad():
        assert torch.equal(logits_of(decoder, tokens), before)
