"""Policy losses without PPO's clip: importance sampling, rollout_is, CISPO, SAPO, DPPO, cross entropy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from skyfleet.algorithms.losses.loss import (
    LossInputs,
    LossOutput,
    PolicyLoss,
    metrics_at_ratio_one,
    ratio,
)
from skyfleet.algorithms.losses.ppo import CLIP_KEYS, NEVER_CLIPPED, clip_range
from skyfleet.config.algorithm import Algorithm

if TYPE_CHECKING:
    from torch import Tensor


def importance_sampling(inputs: LossInputs) -> LossOutput:
    """-rA, as Tinker's loss of that name (https://tinker-docs.thinkingmachines.ai/losses)."""
    ratio_T = (inputs.logprobs_T - inputs.old_logprobs_T).float().exp()
    return LossOutput(
        loss_T=-ratio_T * inputs.advantages_T, metrics_T={"importance_ratio": ratio_T.detach()}
    )


IMPORTANCE_SAMPLING = PolicyLoss(
    name="importance_sampling",
    build=lambda _: importance_sampling,
    metrics=("importance_ratio",),
    constant_metrics=metrics_at_ratio_one({"importance_ratio": 1}),
)


def rollout_is(inputs: LossInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossOutput:
    """-rA log p, the ratio to the engine's logprobs; tokens outside the clip range are masked."""
    ratio_T = ratio(inputs.logprobs_T.detach(), inputs.behaviour_logprobs_T)
    kept_T = ((ratio_T > 1 - eps_clip_low) & (ratio_T < 1 + eps_clip_high)).float()
    return LossOutput(
        loss_T=-ratio_T * kept_T * inputs.advantages_T * inputs.logprobs_T,
        metrics_T={"ppo_clip_ratio": 1 - kept_T},
    )


ROLLOUT_IS = PolicyLoss(
    name="rollout_is",
    build=lambda algorithm: partial(rollout_is, **clip_range(algorithm)),
    reads=CLIP_KEYS,
    metrics=("ppo_clip_ratio",),
    ratio_to=lambda _: "engine",
    constant_metrics=NEVER_CLIPPED,
)


def cispo(
    inputs: LossInputs,
    *,
    cispo_eps_clip_low: float,
    cispo_eps_clip_high: float,
    cispo_anchor: Literal["old", "rollout"],
) -> LossOutput:
    """-A clamp(r) log p, without gradient through the ratio (arXiv 2506.13585)."""
    on_rollout = cispo_anchor == "rollout"
    anchor_T = inputs.behaviour_logprobs_T if on_rollout else inputs.old_logprobs_T
    ratio_T = ratio(inputs.logprobs_T.detach(), anchor_T)
    clamped_T = ratio_T.clamp(1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)
    return LossOutput(
        loss_T=-inputs.advantages_T * clamped_T * inputs.logprobs_T,
        metrics_T={
            "ppo_clip_ratio": (clamped_T != ratio_T).float(),
            "cispo_ratio_clamped_mean": clamped_T,
        },
        stats_T={"cispo_ratio": ratio_T},
    )


def _cispo_anchor(algorithm: Algorithm) -> Literal["old", "engine"]:
    return "engine" if algorithm.cispo.cispo_anchor == "rollout" else "old"


CISPO = PolicyLoss(
    name="cispo",
    build=lambda algorithm: partial(cispo, **algorithm.cispo.model_dump()),
    reads=("algorithm.cispo",),
    metrics=("ppo_clip_ratio", "cispo_ratio_clamped_mean", "cispo_ratio"),
    ratio_to=_cispo_anchor,
    old_ratio_setting="trainer.algorithm.cispo.cispo_anchor=old",
    constant_metrics=metrics_at_ratio_one(
        {"ppo_clip_ratio": 0, "cispo_ratio_{mean,clamped_mean,max,min}": 1}
    ),
)


def sapo(inputs: LossInputs, *, tau_pos: float, tau_neg: float) -> LossOutput:
    """-A (4/tau) sigmoid(tau (r - 1)) of arXiv 2511.20347, tau by the sign of the advantage."""
    import torch

    ratio_T = ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    tau_T = torch.where(inputs.advantages_T > 0, tau_pos, tau_neg)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T
    return LossOutput(loss_T=-inputs.advantages_T * gate_T)


SAPO = PolicyLoss(
    name="sapo",
    build=lambda algorithm: partial(sapo, **algorithm.sapo.model_dump()),
    reads=("algorithm.sapo",),
)


def dppo(
    inputs: LossInputs,
    *,
    dppo_type: Literal["binary_tv", "binary_kl"],
    delta_low: float,
    delta_high: float,
) -> LossOutput:
    """-rA while the token's probability is near the sampling probability (arXiv 2602.04879).

    The distance is that of a token against all the others together, as total variation or as KL.
    """
    logprobs_T, sampled_T = inputs.logprobs_T.detach(), inputs.behaviour_logprobs_T
    p_T, mu_T = logprobs_T.exp(), sampled_T.exp()
    is_tv = dppo_type == "binary_tv"
    distance_T = (p_T - mu_T).abs() if is_tv else _binary_kl(logprobs_T, sampled_T)
    advantages_T = inputs.advantages_T
    too_likely_T = (advantages_T > 0) & (p_T > mu_T) & (distance_T > delta_high)
    too_rare_T = (advantages_T < 0) & (p_T < mu_T) & (distance_T > delta_low)
    dropped_T = (too_likely_T | too_rare_T).float()
    ratio_T = ratio(inputs.logprobs_T, sampled_T)
    return LossOutput(
        loss_T=-ratio_T * advantages_T * (1 - dropped_T), metrics_T={"ppo_clip_ratio": dropped_T}
    )


def _binary_kl(logprobs_T: Tensor, sampled_T: Tensor) -> Tensor:
    p_T, mu_T = logprobs_T.exp(), sampled_T.exp()
    others_T = ((1 - mu_T + 1e-8) / (1 - p_T + 1e-8)).log()
    return mu_T * (sampled_T - logprobs_T) + (1 - mu_T) * others_T


DPPO = PolicyLoss(
    name="dppo",
    build=lambda algorithm: partial(dppo, **algorithm.dppo.model_dump()),
    reads=("algorithm.dppo",),
    metrics=("ppo_clip_ratio",),
    ratio_to=lambda _: "engine",
    constant_metrics=NEVER_CLIPPED,
)


def cross_entropy(inputs: LossInputs) -> LossOutput:
    return LossOutput(loss_T=-inputs.logprobs_T)


CROSS_ENTROPY = PolicyLoss(
    name="cross_entropy", build=lambda _: cross_entropy, ratio_to=lambda _: None
)
