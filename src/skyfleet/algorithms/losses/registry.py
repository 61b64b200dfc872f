"""Registry of policy losses by name, and loading of a user's own."""

from __future__ import annotations

from functools import partial
from typing import Any

from skyfleet.algorithms.losses.covariance import (
    clip_cov,
    kl_cov,
    select_clip_cov,
    select_kl_cov,
)
from skyfleet.algorithms.losses.loss import LossInputs, LossOutput, PolicyLoss, Selector
from skyfleet.algorithms.losses.off_policy import with_correction
from skyfleet.algorithms.losses.policy_gradient import (
    cispo,
    cross_entropy,
    dppo,
    importance_sampling,
    rollout_is,
    sapo,
)
from skyfleet.algorithms.losses.ppo import dual_clip, gspo, ppo_clip
from skyfleet.config.algorithm import Algorithm
from skyfleet.config.imports import import_named, with_kwargs
from skyfleet.errors import ConfigError

_KEY = "trainer.algorithm.policy_loss_type"


def build_policy_loss(algorithm: Algorithm) -> PolicyLoss:
    """The loss a configuration names, with its settings and its off-policy correction."""
    name = algorithm.policy_loss_type
    loss: PolicyLoss
    if ":" in name:
        own = with_kwargs(
            import_named(name, key=_KEY),
            algorithm.policy_loss_kwargs,
            named=f"{_KEY}={name!r}",
            key="trainer.algorithm.policy_loss_kwargs",
            takes="LossInputs",
        )
        loss = partial(_checked, name, own)
    else:
        loss = _named(algorithm)[name]
    return with_correction(loss, algorithm.off_policy_correction)


def selector_of(algorithm: Algorithm) -> Selector | None:
    """For a loss that compares the tokens of a whole mini-batch, the one that does."""
    if algorithm.policy_loss_type == "clip_cov":
        return partial(select_clip_cov, **algorithm.clip_cov.model_dump(), **_clip(algorithm))
    if algorithm.policy_loss_type == "kl_cov":
        return partial(select_kl_cov, kl_cov_frac=algorithm.kl_cov.kl_cov_frac)
    return None


def _checked(name: str, own: PolicyLoss, inputs: LossInputs) -> LossOutput:
    """A loss of one's own: its mean would broadcast and train something else than it says."""
    output = own(inputs)
    if not isinstance(output, LossOutput):
        raise ConfigError(f"{_KEY}={name!r} returns a {type(output).__name__}; return a LossOutput")
    tokens, sequences = inputs.logprobs_T.shape, inputs.lengths_B.shape
    owed = [("loss_T", output.loss_T, tokens)]
    owed += [(f"metrics_T[{key!r}]", x, tokens) for key, x in output.metrics_T.items()]
    owed += [(f"metrics_B[{key!r}]", x, sequences) for key, x in output.metrics_B.items()]
    owed += [(f"spreads_T[{key!r}]", x, tokens) for key, x in output.spreads_T.items()]
    for field, values, shape in owed:
        if values.shape != shape:
            raise ConfigError(
                f"{_KEY}={name!r} gave {field} of shape {tuple(values.shape)} where {tuple(shape)} is "
                "owed; leave the mean to trainer.algorithm.loss_reduction"
            )
    return output


def _named(algorithm: Algorithm) -> dict[str, PolicyLoss]:
    clip = _clip(algorithm)
    return {
        "regular": partial(ppo_clip, **clip),
        "dual_clip": partial(dual_clip, **clip, clip_ratio_c=algorithm.clip_ratio_c),
        "gspo": partial(gspo, **clip),
        "cispo": partial(cispo, **algorithm.cispo.model_dump()),
        "sapo": partial(sapo, **algorithm.sapo.model_dump()),
        "dppo": partial(dppo, **algorithm.dppo.model_dump()),
        "clip_cov": partial(clip_cov, **clip),
        "kl_cov": partial(kl_cov, ppo_kl_coef=algorithm.kl_cov.ppo_kl_coef),
        "rollout_is": partial(rollout_is, **clip),
        "importance_sampling": importance_sampling,
        "cross_entropy": cross_entropy,
    }


def _clip(algorithm: Algorithm) -> dict[str, Any]:
    return {"eps_clip_low": algorithm.eps_clip_low, "eps_clip_high": algorithm.eps_clip_high}
