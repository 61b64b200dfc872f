"""An update does not depend on how a mini-batch is split, and a learner resumes from a checkpoint."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.fakes.samples import random_groups, sample
from tests.fakes.small_models import logprobs_of, small_decoder
from torch import nn

from skyfleet.algorithms.kl import k3
from skyfleet.algorithms.losses.loss import LossInputs, LossOutput
from skyfleet.algorithms.losses.ppo import ppo_clip
from skyfleet.algorithms.reduction import (
    Reduction,
    seq_mean_token_sum_norm,
    sequence_mean,
    token_mean,
)
from skyfleet.algorithms.sample import Sample
from skyfleet.errors import CheckpointError, OutOfMemoryError
from skyfleet.learner.batching import action_logprobs, pack
from skyfleet.learner.critic import Critic
from skyfleet.learner.optimizer import OptimizerSettings, constant_with_warmup
from skyfleet.learner.single_device import LearnerSettings, SingleDeviceLearner
from skyfleet.models.decoder import Decoder

SETTINGS = LearnerSettings(
    optimizer=OptimizerSettings(lr=1e-4),
    warm_start_optimizer=OptimizerSettings(lr=1e-2),
    policy_loss=partial(ppo_clip, eps_clip_low=0.2, eps_clip_high=0.2),
    reduce=token_mean,
    temperature=0.9,
    policy_mini_batch_size=100,
    max_tokens_per_microbatch=10_000,
)


def learner(
    decoder: Decoder,
    settings: LearnerSettings = SETTINGS,
    *,
    make_reference: Callable[[], Decoder] | None = None,
    critic: Critic | None = None,
) -> SingleDeviceLearner:
    def save(folder: Path) -> None:
        torch.save(decoder.module.state_dict(), folder / "weights.pt")

    def load(folder: Path) -> None:
        decoder.module.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))

    return SingleDeviceLearner(
        decoder,
        settings,
        make_reference=make_reference,
        critic=critic,
        save_policy=save,
        load_policy=load,
    )


def on_policy(decoder: Decoder, samples: Sequence[Sample], *, off_by: float = 0.0) -> list[Sample]:
    """The same samples with the logprobs this decoder gives them, in turn too high and too low."""
    truthful, off = [], itertools.cycle((off_by, -off_by))
    for s in samples:
        every = logprobs_of(
            decoder, s.token_ids, len(s.token_ids) - 1, temperature=SETTINGS.temperature
        )
        pairs = zip([0.0, *every.tolist()], s.loss_mask, strict=True)
        truthful.append(replace(s, logprobs=tuple(p + next(off) if c else 0.0 for p, c in pairs)))
    return truthful


async def updated(
    settings: LearnerSettings, samples: Sequence[Sample], *, reference: bool
) -> tuple[list[torch.Tensor], list[nn.Parameter], dict[str, float]]:
    """Gradients, weights and metrics of one step from the same beginning."""
    decoder = small_decoder(seed=1)
    parameters = list(decoder.module.parameters())
    gradients: dict[int, torch.Tensor] = {}
    for index, parameter in enumerate(parameters):

        def keep(p: torch.Tensor, index: int = index) -> None:
            assert p.grad is not None
            gradients[index] = p.grad.clone()

        parameter.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]
    student = learner(
        decoder,
        settings,
        make_reference=partial(small_decoder, seed=2) if reference else None,
    )
    report = await student.step(samples)
    return [gradients[i] for i in range(len(parameters))], parameters, dict(report.metrics)


@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize(
    "reduce", [token_mean, sequence_mean, partial(seq_mean_token_sum_norm, max_seq_len=32)]
)
async def test_the_update_does_not_depend_on_the_micro_batches(
    reduce: Reduction, with_kl: bool
) -> None:
    samples = on_policy(small_decoder(seed=1), random_groups(3), off_by=0.25)
    # Adam makes a rate's worth of noise where a gradient is nearly zero.
    settings = replace(SETTINGS, reduce=reduce, optimizer=OptimizerSettings(lr=1e-5))
    if with_kl:
        settings = replace(settings, kl=k3, kl_loss_coef=0.5)
    whole = await updated(settings, samples, reference=with_kl)
    assert ("policy/policy_kl" in whole[2]) == with_kl
    for max_tokens in (1, 60, 150):
        cut = await updated(
            replace(settings, max_tokens_per_microbatch=max_tokens), samples, reference=with_kl
        )
        for one, other in zip(cut[0], whole[0], strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
        for one, other in zip(cut[1], whole[1], strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
        assert cut[2] == pytest.approx(whole[2], abs=1e-6, rel=1e-5)


async def test_the_loss_is_the_weighted_sum_of_its_tokens() -> None:
    decoder = small_decoder()
    pair = [
        sample([1, 2, 3, 4], [False, False, True, True], advantage=2.0),
        sample([1, 5], [False, True], advantage=-3.0),
    ]
    report = await learner(decoder).step(on_policy(decoder, pair))
    # The ratio is 1 everywhere: minus the mean of 2, 2, -3.
    assert report.metrics["policy/policy_loss"] == pytest.approx(-1 / 3, abs=1e-5)
    assert report.metrics["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    assert report.metrics["policy/ppo_clip_ratio"] == 0.0
    assert report.policy_version == 1


@pytest.mark.parametrize("chunk_size", [1, 5])
def test_logprobs_and_gradients_do_not_depend_on_the_chunk(chunk_size: int) -> None:
    decoder, samples = small_decoder(), random_groups(2)
    (batch,) = pack(samples, [1.0] * len(samples), max_tokens=10_000, device=decoder.device)
    whole, cut = (
        action_logprobs(decoder, batch, temperature=0.7, chunk_size=size)
        for size in (10_000, chunk_size)
    )
    truth = torch.cat(
        [
            logprobs_of(decoder, s.token_ids, len(s.token_ids) - 1, temperature=0.7)[
                torch.tensor(s.loss_mask[1:])
            ]
            for s in samples
        ]
    )
    torch.testing.assert_close(cut[0].detach(), truth, atol=1e-5, rtol=0)
    torch.testing.assert_close(cut[1], whole[1], atol=1e-5, rtol=0)
    parameters = list(decoder.module.parameters())
    one, other = (torch.autograd.grad(x[0].sum(), parameters) for x in (whole, cut))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


async def test_sft_steps_lower_the_loss() -> None:
    student, samples = learner(small_decoder()), random_groups(2)
    demonstrations = [
        replace(s, advantages=tuple(float(is_action) for is_action in s.loss_mask)) for s in samples
    ]
    losses = [(await student.sft_step(demonstrations)).metrics["loss"] for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    assert student.policy_version == 20


async def test_a_step_raises_logprobs_of_positive_and_lowers_those_of_negative_advantages() -> None:
    decoder = small_decoder()
    good, bad = [7, 8, 9, 10], [7, 8, 20, 30]
    pair = [
        sample(good, [False, False, True, True], advantage=1.0),
        sample(bad, [False, False, True, True], advantage=-1.0),
    ]
    before = [float(logprobs_of(decoder, ids, 2).sum()) for ids in (good, bad)]
    await learner(decoder).step(on_policy(decoder, pair))
    after = [float(logprobs_of(decoder, ids, 2).sum()) for ids in (good, bad)]
    assert after[0] > before[0]
    assert after[1] < before[1]


async def test_a_loss_that_is_not_finite_does_not_change_the_weights() -> None:
    decoder = small_decoder()
    before = [p.clone() for p in decoder.module.parameters()]
    broken = sample([1, 2, 3], [False, True, True], advantage=math.inf)
    report = await learner(decoder).step([broken])
    assert not math.isfinite(report.metrics["policy/grad_norm"])
    for parameter, old in zip(decoder.module.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


async def test_a_step_is_one_update_per_mini_batch_and_epoch() -> None:
    samples = random_groups(4)
    settings = replace(SETTINGS, policy_mini_batch_size=2, update_epochs_per_batch=3)
    warmup = partial(constant_with_warmup, num_warmup_steps=9)
    warming = replace(settings, optimizer=OptimizerSettings(lr=1.0e-4, schedule=warmup))
    report = await learner(small_decoder(), warming).step(samples)
    # Six updates at 1/10 to 6/10 of the rate.
    assert report.metrics["policy/policy_lr"] == pytest.approx(0.35e-4)


@pytest.mark.parametrize(("mini_batch", "epochs"), [(8, 1), (1, 1), (8, 4)])
async def test_the_gap_to_the_engine_is_measured_before_any_update(
    mini_batch: int, epochs: int
) -> None:
    settings = replace(
        SETTINGS,
        policy_mini_batch_size=mini_batch,
        update_epochs_per_batch=epochs,
        optimizer=OptimizerSettings(lr=1e-3),
    )
    samples = on_policy(small_decoder(seed=1), random_groups(8))
    report = await learner(small_decoder(seed=1), settings).step(samples)
    assert report.metrics["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    assert report.metrics["policy/rollout_train_logprobs_abs_diff_max"] < 1e-5


@pytest.mark.parametrize("max_tokens", [1, 10_000])
async def test_one_outlier_token_shows_in_the_maximum_and_the_deviation_of_the_gap(
    max_tokens: int,
) -> None:
    first, *others = on_policy(small_decoder(), random_groups(3))
    at = first.loss_mask.index(True)
    logprobs = (*first.logprobs[:at], first.logprobs[at] - 0.5, *first.logprobs[at + 1 :])
    settings = replace(SETTINGS, policy_mini_batch_size=1, max_tokens_per_microbatch=max_tokens)
    report = await learner(small_decoder(), settings).step(
        [replace(first, logprobs=logprobs), *others]
    )
    gap = "policy/rollout_train_logprobs_abs_diff"
    assert report.metrics[f"{gap}_max"] == pytest.approx(0.5, abs=1e-4)
    assert report.metrics[f"{gap}_min"] == pytest.approx(0.0, abs=1e-5)
    # One of the n tokens of the first mini-batch, which is the first task.
    far = 1 / sum(s.n_action_tokens for s in (first, *others) if s.task_key == first.task_key)
    assert report.metrics[f"{gap}_mean"] == pytest.approx(0.5 * far, abs=1e-5)
    deviation = 0.5 * math.sqrt(far * (1 - far))
    assert report.metrics[f"{gap}_std"] == pytest.approx(deviation, abs=1e-4)


async def test_after_truncated_sampling_old_logprobs_are_recomputed() -> None:
    samples = random_groups(3)
    recorded = replace(SETTINGS, max_tokens_per_microbatch=40)
    own = replace(recorded, comparable_logprobs=False)
    ratios = []
    for settings in (recorded, own):
        report = await learner(small_decoder(), settings).step(samples)
        ratios.append(report.metrics["policy/ppo_clip_ratio"])
        assert ("policy/rollout_train_logprobs_abs_diff_mean" in report.metrics) == (
            settings is recorded
        )
    assert ratios[0] > 0.5  # recorded as -4 each, which are not the logprobs of this policy
    assert ratios[1] == 0


async def test_the_kl_reference_is_the_policy_at_the_first_rl_step() -> None:
    decoder = small_decoder()
    made: list[Decoder] = []

    def reference() -> Decoder:
        twin = small_decoder()
        twin.module.load_state_dict(decoder.module.state_dict())
        made.append(twin)
        return twin

    settings = replace(SETTINGS, kl=k3, kl_loss_coef=0.1)
    student, samples = learner(decoder, settings, make_reference=reference), random_groups(2)
    await student.sft_step(samples)
    assert made == []
    first = await student.step(samples)
    second = await student.step(samples)
    assert len(made) == 1
    assert first.metrics["policy/policy_kl"] == pytest.approx(0.0, abs=1e-6)
    assert second.metrics["policy/policy_kl"] > 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("phase", ["sft_step", "step"])
async def test_a_loaded_learner_continues_bit_for_bit(
    tmp_path: Path, phase: str, dtype: torch.dtype
) -> None:
    samples: Any = random_groups(2)
    decoders = [small_decoder(seed=seed, dtype=dtype) for seed in (1, 2)]
    straight, resumed = map(learner, decoders)
    for _ in range(2):
        await getattr(straight, phase)(samples)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.policy_version == straight.policy_version == 2
    reports = [[await getattr(s, phase)(samples) for _ in range(3)] for s in (straight, resumed)]
    assert reports[0] == reports[1]
    for one, other in zip(*(d.module.parameters() for d in decoders), strict=True):
        assert torch.equal(one, other)


class Pickled:
    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps(Pickled()), "objects other than tensors .* they could run code"),
        (b"", "cannot be read"),
        (b"PK\x03\x04 half a file", "cannot be read"),
        (pickle.dumps([1]), "contains a list and not a state|objects other than tensors"),
    ],
    ids=["pickle", "empty", "half a file", "list"],
)
def test_a_file_without_a_state_is_one_sentence_and_never_executed(
    tmp_path: Path, content: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = learner(small_decoder(seed=1))
    one.save(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        one.load(tmp_path)
    assert "weights_only" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "executed" not in capsys.readouterr().out


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_gradients_are_the_same_bits_every_time_with_several_threads() -> None:
    """Gradients of shared beginnings are sums over a group; their order must not be chance."""
    draw = Random(1)
    samples = []
    for group in range(8):
        beginning = [draw.randrange(60) for _ in range(150)]
        for _ in range(8):
            tokens = beginning + [draw.randrange(60) for _ in range(60)]
            mask = [False] * 150 + [True] * 60
            samples.append(sample(tokens, mask, task_key=f"t{group}"))
    decoder = small_decoder()
    first: list[torch.Tensor] = []
    for _ in range(6):
        (batch,) = pack(samples, [1e-3] * 64, max_tokens=64 * 210, device=decoder.device)
        logprobs_N, _ = action_logprobs(decoder, batch, temperature=1.0, chunk_size=1024)
        parameters = list(decoder.module.parameters())
        gradients = torch.autograd.grad(logprobs_N.sum(), parameters)
        first = first or list(gradients)
        assert all(map(torch.equal, gradients, first))


async def test_an_update_without_enough_memory_is_one_sentence_with_the_keys_to_lower() -> None:
    def allocate_too_much(inputs: LossInputs) -> LossOutput:
        return LossOutput(loss_T=torch.empty(2**50))

    decoder = small_decoder()
    samples = on_policy(decoder, random_groups(1))
    with pytest.raises(
        OutOfMemoryError, match=r"^the update ran out of memory \(it tried to"
    ) as it:
        await learner(decoder, replace(SETTINGS, policy_loss=allocate_too_much)).step(samples)
    assert "trainer.max_tokens_per_microbatch" in str(it.value)


async def test_gradient_checkpointing_gives_the_same_weights() -> None:
    weights = []
    for again in (False, True):
        decoder = small_decoder(seed=3)
        samples = on_policy(decoder, random_groups(3))
        await learner(decoder, replace(SETTINGS, gradient_checkpointing=again)).step(samples)
        weights.append(torch.cat([p.detach().ravel() for p in decoder.module.parameters()]))
    assert torch.equal(*weights)
