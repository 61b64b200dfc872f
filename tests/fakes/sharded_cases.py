"""Learners whose gradients are compared: one process against several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.fakes.samples import random_groups, sample
from tests.fakes.small_models import DIMENSIONS, qwen2, seeded, small_decoder
from torch import Tensor, nn
from transformers import Olmo2Config, Olmo2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from skyfleet.algorithms.advantages import generalized_advantage
from skyfleet.algorithms.kl import RewardKl, fixed_control, k1, k3
from skyfleet.algorithms.losses.ppo import ppo_clip
from skyfleet.algorithms.reduction import sequence_mean, token_mean
from skyfleet.algorithms.sample import Sample
from skyfleet.config.policy import Lora
from skyfleet.learner.critic import Critic, CriticSettings
from skyfleet.learner.optimizer import OptimizerSettings
from skyfleet.learner.process_ranks import ProcessRanks, RankLayout
from skyfleet.learner.ranks import Ranks
from skyfleet.learner.single_device import LearnerSettings, SingleDeviceLearner
from skyfleet.models.decoder import Decoder
from skyfleet.models.hf_decoder import make_decoder
from skyfleet.models.lora import add_adapters, merge
from skyfleet.models.sharding import shard_decoder

SETTINGS = LearnerSettings(
    optimizer=OptimizerSettings(lr=1e-3, max_grad_norm=0.0),
    warm_start_optimizer=OptimizerSettings(lr=1e-2),
    policy_loss=partial(ppo_clip, eps_clip_low=0.2, eps_clip_high=0.2),
    reduce=token_mean,
    temperature=0.9,
    policy_mini_batch_size=100,
    max_tokens_per_microbatch=90,
)


def _fused(*, seed: int = 0) -> Decoder:
    plain = small_decoder(seed=seed)
    return Decoder(plain.module, max_positions=256, fused=True)


def _biased() -> Decoder:
    return Decoder(qwen2(), max_positions=256)


def _foreign() -> Decoder:
    return make_decoder(
        seeded(Olmo2ForCausalLM, Olmo2Config(**DIMENSIONS, pad_token_id=0)), max_positions=256
    )


def _experts() -> Decoder:
    build: Any = Qwen3MoeConfig
    config = build(
        **DIMENSIONS, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        decoder_sparse_step=1,
    )  # fmt: skip
    return make_decoder(seeded(Qwen3MoeForCausalLM, config), max_positions=256)


def _adapted(build: Callable[[], Decoder] = small_decoder) -> Decoder:
    decoder = build()
    add_adapters(decoder.module, Lora(rank=4, alpha=8), seed=1)
    return decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    build: Callable[[], Decoder] = small_decoder
    settings: LearnerSettings = SETTINGS
    samples: Sequence[Sample]
    reference: bool = False
    critic: bool = False


def _uneven() -> list[Sample]:
    """One long sample and some short ones, of which ranks get one or none."""
    long = sample(range(60), [False] + [True] * 59, task_key="long")
    short = [
        sample(range(n + 2), [False] * n + [True, False], task_key=f"short-{n}", advantage=-0.5)
        for n in range(2, 5)
    ]
    return [long, *short]


def _rewarded() -> list[Sample]:
    return [
        replace(s, attempt=i % 4, group_rewards=(1.0, 0.0, 0.0, 0.0))
        for i, s in enumerate(random_groups(3))
    ]


def build_cases() -> dict[str, Case]:
    groups = random_groups(4)
    kl = replace(SETTINGS, kl=k3, kl_loss_coef=0.3)
    reward_kl = RewardKl(
        estimate=k1,
        coef=0.1,
        control=fixed_control,
        compute_advantages=lambda samples: list(samples),
    )
    return {
        "plain": Case(samples=groups),
        "biases": Case(build=_biased, samples=groups),
        "four key-value heads": Case(
            build=partial(small_decoder, num_key_value_heads=4), samples=groups
        ),
        "uneven masks": Case(samples=_uneven()),
        "sequence mean": Case(samples=groups, settings=replace(SETTINGS, reduce=sequence_mean)),
        "old logprobs, entropy": Case(
            samples=groups,
            settings=replace(SETTINGS, recompute_old_logprobs=True, entropy_loss_coef=0.1),
        ),
        "KL loss": Case(samples=groups, settings=kl, reference=True),
        "KL in reward": Case(
            samples=groups, settings=replace(SETTINGS, reward_kl=reward_kl), reference=True
        ),
        "critic": Case(samples=_rewarded(), critic=True),
        "LoRA": Case(build=_adapted, samples=groups),
        "recomputed": Case(samples=groups, settings=replace(SETTINGS, gradient_checkpointing=True)),
        "fused": Case(build=_fused, samples=groups),
        "fused, recomputed, LoRA": Case(
            build=partial(_adapted, _fused),
            samples=groups,
            settings=replace(SETTINGS, gradient_checkpointing=True),
        ),
        "transformers": Case(build=_foreign, samples=groups),
        "transformers, recomputed": Case(
            build=_foreign, samples=groups, settings=replace(SETTINGS, gradient_checkpointing=True)
        ),
        "mixture of experts": Case(build=_experts, samples=groups),
        "clipped": Case(
            samples=groups,
            settings=replace(SETTINGS, optimizer=OptimizerSettings(lr=1e-3, max_grad_norm=0.01)),
        ),
    }


LAYOUTS = {
    "1": RankLayout(),
    "2": RankLayout(shards=2),
    "4": RankLayout(shards=4),
    "2 x 2 hybrid": RankLayout(replicas=2, shards=2),
    "TP 2": RankLayout(tensor=2),
    "CP 2": RankLayout(sequence=2),
    "DP 2 x TP 2": RankLayout(shards=2, tensor=2),
    "DP 2 x CP 2": RankLayout(shards=2, sequence=2),
    "CP 2 x TP 2": RankLayout(sequence=2, tensor=2),
}


_OF_TRANSFORMERS = ("transformers", "transformers, recomputed", "mixture of experts")


def runs_in(name: str, layout: str) -> bool:
    """Tensor parallelism needs our own decoder, and every rank needs key-value heads."""
    if "TP" in layout and name in _OF_TRANSFORMERS:
        return False
    return layout != "CP 2 x TP 2" or name == "four key-value heads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    gradients: dict[str, Tensor]
    """After clipping; the critic's begin with `critic.`."""
    weights: dict[str, Tensor]
    """After the update."""
    metrics: dict[str, float]


def compute_update(
    name: str,
    layout: RankLayout | None = None,
    *,
    load: Path | None = None,
    save: Path | None = None,
) -> Outcome:
    """One update of a case, on this rank of a layout or in one process.

    It continues from the checkpoint `load` and is saved to `save`.
    """
    case = build_cases()[name]
    decoder = case.build()
    names = dict(enumerate(_trained(decoder.module)))
    ranks = Ranks() if layout is None else ProcessRanks(layout, device_type="cpu")
    shard = partial(_shard, ranks) if isinstance(ranks, ProcessRanks) else _keep_whole
    shard(decoder)
    recorded: dict[str, Tensor] = {}
    _record_gradients(ranks, recorded, names)
    critic = Critic(partial(small_decoder, seed=3), _CRITIC, ranks, shard) if case.critic else None

    def make_reference() -> Decoder:
        reference = small_decoder(seed=2)
        reference.module.requires_grad_(False)
        shard(reference, trains=False)
        return reference

    learner = SingleDeviceLearner(
        decoder,
        case.settings,
        make_reference=make_reference if case.reference else None,
        critic=critic,
        save_policy=partial(_save_policy, ranks, decoder),
        load_policy=partial(_load_policy, ranks, decoder),
        ranks=ranks,
    )
    if load is not None:
        learner.load(load)
        if critic is not None:
            critic.load(load)
    report = asyncio.run(learner.step(case.samples))
    if save is not None:
        learner.save(save)
        if critic is not None:
            critic.save(save)
    weights = {name: weight.clone() for name, weight in ranks.whole_weights(decoder.module)}
    return Outcome(gradients=recorded, weights=weights, metrics=dict(report.metrics))


def compute_updates(names: Sequence[str], layout: RankLayout) -> dict[str, Outcome]:
    """Of several cases, one after another in the same processes."""
    return {name: compute_update(name, layout) for name in names}


def continue_update(
    name: str, layout: RankLayout | None, load: Path | None, save: Path | None
) -> Outcome:
    return compute_update(name, layout, load=load, save=save)


def _save_policy(ranks: Ranks, decoder: Decoder, folder: Path) -> None:
    """The whole weights and adapters, as a Hugging Face folder has them."""
    named = dict(decoder.module.named_parameters())
    whole = {name: ranks.gather_parameter(p).clone() for name, p in named.items()}
    if ranks.is_first:
        torch.save(whole, folder / "weights.pt")


@torch.no_grad()
def _load_policy(ranks: Ranks, decoder: Decoder, folder: Path) -> None:
    whole = torch.load(folder / "weights.pt")
    for name, parameter in decoder.module.named_parameters():
        ranks.keep_part(parameter, ranks.local(parameter), whole[name])
    merge(decoder.module)


def _keep_whole(decoder: Decoder, *, trains: bool = True) -> None:
    """One process shards nothing."""


_CRITIC = CriticSettings(
    optimizer=OptimizerSettings(lr=3e-3),
    value_clip=None,
    compute_advantages=partial(generalized_advantage, gamma=1.0, lambd=1.0),
    critic_mini_batch_size=100,
    max_tokens_per_microbatch=90,
)


def _trained(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad]


def _shard(ranks: ProcessRanks, decoder: Decoder, *, trains: bool = True) -> None:
    shards = shard_decoder(decoder, ranks.plan(), trains=trains)
    ranks.register(decoder.module, shards.splits)


def _record_gradients(ranks: Ranks, recorded: dict[str, Tensor], names: dict[int, str]) -> None:
    """Of each update, before the optimizer clears them; the critic has one parameter more."""
    clip = ranks.clip

    def recording(parameters: Sequence[nn.Parameter], limit: float) -> float:
        norm = clip(parameters, limit)
        is_critic = len(parameters) != len(names)
        for index, parameter in enumerate(parameters):
            name = f"critic.{index}" if is_critic else names[index]
            for _, whole in ranks.whole_gradients([(name, parameter)]):
                assert whole.grad is not None
                recorded[name] = whole.grad.detach().clone()
        return norm

    ranks.clip = recording  # type: ignore[method-assign]


def relative_errors(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Of each tensor; of one that is zero but for rounding, relative to the norm of all, times 100.

    The limit of both is 1e-5: of a gradient that should be zero, 1e-7 of the whole.
    """
    assert ours.keys() == expected.keys()
    total = float(torch.stack([e.square().sum() for e in expected.values()]).sum().sqrt())
    errors = {}
    for name, tensor in expected.items():
        norm, gap = float(tensor.norm()), float((ours[name] - tensor).norm())
        errors[name] = 100 * gap / total if norm < 1e-5 * total else gap / norm
    return errors


def merge_random_adapters(layout: RankLayout | None = None) -> dict[str, Tensor]:
    """The whole merged weights of a bfloat16 model whose adapters have moved."""
    decoder = small_decoder(dtype=torch.bfloat16)
    add_adapters(decoder.module, Lora(rank=4, alpha=8), seed=1)
    ranks = Ranks()
    if layout is not None:
        ranks = ProcessRanks(layout, device_type="cpu")
        _shard(ranks, decoder)
    drawn = torch.Generator().manual_seed(2)
    whole = small_decoder()
    add_adapters(whole.module, Lora(rank=4, alpha=8), seed=1)
    shapes = {name: p.shape for name, p in whole.module.named_parameters()}
    with torch.no_grad():
        for name, parameter in decoder.module.named_parameters():
            if "lora_B" in name:
                moved = 0.01 * torch.randn(shapes[name], generator=drawn)
                ranks.keep_part(parameter, ranks.local(parameter), moved)
    merge(decoder.module)
    return {name: weight.clone() for name, weight in ranks.whole_weights(decoder.module)}


def update_in_bfloat16(layout: RankLayout | None = None) -> tuple[dict[str, Tensor], float]:
    """The float32 masters after one update of a bfloat16 model, and the norm of its gradients."""
    decoder = small_decoder(dtype=torch.bfloat16)
    ranks = Ranks()
    if layout is not None:
        ranks = ProcessRanks(layout, device_type="cpu")
        _shard(ranks, decoder)
    learner = SingleDeviceLearner(
        decoder, SETTINGS, save_policy=lambda _: None, load_policy=lambda _: None, ranks=ranks
    )
    report = asyncio.run(learner.step(random_groups(4)))
    weights = {name: weight.clone() for name, weight in learner.named_weights()}
    return weights, report.metrics["policy/grad_norm"]
