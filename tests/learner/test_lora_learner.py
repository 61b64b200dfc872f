"""A learner with LoRA: only adapters train, engines use them at once, and checkpoints resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engines.test_embedded_engine import PROMPT, SAMPLING, engine
from tests.fakes.samples import random_groups, sample
from tests.fakes.small_models import logprobs_of, small_decoder
from tests.learner.test_single_device_learner import SETTINGS, learner, on_policy

from skyfleet.algorithms.kl import k3
from skyfleet.config.policy import Lora
from skyfleet.learner.optimizer import OptimizerSettings
from skyfleet.models.decoder import Decoder
from skyfleet.models.lora import adapters, add_adapters, merge, strip_adapters

FAST = replace(SETTINGS, optimizer=OptimizerSettings(lr=1e-2))


def adapted(*, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = small_decoder(seed=1, dtype=dtype)
    add_adapters(decoder.module, Lora(rank=4, alpha=8), seed=1)
    return decoder


async def test_only_adapters_and_the_weights_they_are_merged_into_change() -> None:
    decoder = adapted()
    before = {n: p.detach().clone() for n, p in decoder.module.named_parameters()}
    student = learner(decoder, FAST)
    for _ in range(2):  # A begins to move when B has left zero
        await student.step(on_policy(decoder, random_groups(2)))
    moved = {
        n for n, p in decoder.module.named_parameters() if not torch.equal(p.detach(), before[n])
    }
    layers = adapters(decoder.module)
    parts = ("weight", "lora_A", "lora_B")
    assert moved == {f"{name}.{part}" for name in layers for part in parts}
    base = {name: layer.base for name, layer in layers.items()}
    assert all(torch.equal(base[name], before[f"{name}.weight"]) for name in base)


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
async def test_an_engine_samples_with_the_new_adapters_after_a_step(
    dtype: torch.dtype, gap: float
) -> None:
    decoder = adapted(dtype=dtype)
    policy_model = engine(decoder)
    before = await policy_model.generate(PROMPT, SAMPLING, session="s")
    student = learner(decoder, FAST)
    for _ in range(3):
        await student.step(on_policy(decoder, random_groups(2)))
    policy_model.policy_version = student.policy_version
    after = await policy_model.generate(PROMPT, SAMPLING, session="s")
    assert after.logprobs != before.logprobs
    sequence = [*PROMPT, *after.token_ids]
    expected = logprobs_of(decoder, sequence, len(after.token_ids), temperature=0.8)
    # One token may be further off than all of them are in the mean.
    assert after.logprobs == pytest.approx(expected.tolist(), abs=2 * gap)
    mask = [False] * len(PROMPT) + [True] * len(after.token_ids)
    sampled = replace(
        sample(sequence, mask), logprobs=(*[0.0] * len(PROMPT), *after.logprobs), policy_version=3
    )
    report = await learner(decoder, replace(FAST, temperature=0.8)).step([sampled])
    assert report.metrics["policy/rollout_train_logprobs_abs_diff_mean"] < gap


async def test_a_step_raises_the_logprobs_of_positive_advantages() -> None:
    decoder = adapted()
    good = sample([7, 8, 9, 10], [False, False, True, True], advantage=1.0)
    before = float(logprobs_of(decoder, good.token_ids, 2).sum())
    await learner(decoder, FAST).step(on_policy(decoder, [good]))
    assert float(logprobs_of(decoder, good.token_ids, 2).sum()) > before


async def test_the_base_weights_are_the_reference_without_a_copy() -> None:
    decoder = adapted()

    def reference() -> Decoder:
        base = strip_adapters(decoder.module, merged=False)
        return Decoder(base.requires_grad_(False), max_positions=256)

    settings = replace(FAST, kl=k3, kl_loss_coef=0.1)
    student = learner(decoder, settings, make_reference=reference)
    samples = on_policy(decoder, random_groups(2))
    first, second = [await student.step(samples) for _ in range(2)]
    assert first.metrics["policy/policy_kl"] == pytest.approx(0.0, abs=1e-6)
    assert second.metrics["policy/policy_kl"] > 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_loaded_learner_continues_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    samples = random_groups(2)
    decoders = [adapted(dtype=dtype) for _ in range(2)]
    straight, resumed = (learner(decoder, FAST) for decoder in decoders)
    for _ in range(2):
        await straight.step(samples)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    merge(decoders[1].module)
    reports = [[await s.step(samples) for _ in range(3)] for s in (straight, resumed)]
    assert reports[0] == reports[1]
    for one, other in zip(*(d.module.parameters() for d in decoders), strict=True):
        assert torch.equal(one, other)
