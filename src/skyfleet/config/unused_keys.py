"""Idle keys: those that were set, while what reads them is switched off by another key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from skyfleet.config.keys import default_at, known_keys, value_at
from skyfleet.config.root import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Names stand under `trainer`."""

    opens: Mapping[str, tuple[object, ...]]
    """Key -> the values under which the keys behind are read; one is enough, () is any but null and 0."""
    behind: tuple[str, ...]
    """A section stands for all its keys."""


_OWN = "module:function"
"""Of the user's own, whatever its name."""
_CLIPPING = ("regular", "dual_clip", "gspo", "clip_cov", "rollout_is")


def _gate(key: str, *values: object, behind: tuple[str, ...]) -> Gate:
    return Gate(
        opens={f"algorithm.{key}": values}, behind=tuple(f"algorithm.{name}" for name in behind)
    )


# A key that stands behind several is told of the first that is shut.
GATES = (
    Gate(
        opens={"algorithm.use_kl_loss": (True,), "algorithm.use_kl_in_reward": (True,)},
        behind=(
            *("algorithm.kl_loss_coef", "algorithm.kl_estimator_type", "algorithm.kl_ctrl"),
            *("ref.model.path", "ref.fsdp_config", "update_ref_every_epoch"),
        ),
    ),
    _gate("use_kl_in_reward", True, behind=("kl_ctrl",)),
    _gate("kl_ctrl.type", "adaptive", behind=("kl_ctrl",)),
    _gate("use_entropy_loss", True, behind=("entropy_loss_coef",)),
    _gate("advantage_estimator", _OWN, behind=("advantage_estimator_kwargs",)),
    _gate("advantage_estimator", "grpo", behind=("grpo_norm_by_std",)),
    _gate("advantage_estimator", "reinforce++", "gae", behind=("gamma",)),
    _gate("advantage_estimator", "gae", behind=("lambd", "value_clip")),
    Gate(
        opens={"algorithm.advantage_estimator": ("gae",)},
        behind=("critic.optimizer_config", "critic_mini_batch_size"),
    ),
    Gate(
        opens={"policy.model.lora.rank": ()},
        behind=tuple(
            f"policy.model.lora.{name}" for name in ("alpha", "target_modules", "exclude_modules")
        ),
    ),
    Gate(
        opens={"algorithm.zero_variance_filter": (True,), "algorithm.dynamic_sampling.type": ()},
        behind=("algorithm.zero_variance_filter_tol",),
    ),
    _gate("dynamic_sampling.type", behind=("dynamic_sampling.max_sample_batches",)),
    _gate("dynamic_sampling.type", "replace", behind=("dynamic_sampling.min_replace_ratio",)),
    _gate("overlong_buffer_len", behind=("overlong_max_len", "overlong_buffer_penalty_factor")),
    _gate("policy_loss_type", _OWN, behind=("policy_loss_kwargs",)),
    _gate("policy_loss_type", *_CLIPPING, behind=("eps_clip_low", "eps_clip_high")),
    _gate("policy_loss_type", "dual_clip", behind=("clip_ratio_c",)),
    *(
        _gate("policy_loss_type", name, behind=(name,))
        for name in ("sapo", "clip_cov", "kl_cov", "cispo", "dppo")
    ),
    _gate("loss_reduction", "seq_mean_token_sum_norm", behind=("max_seq_len",)),
    *(
        _gate(
            "off_policy_correction.tis_ratio_type",
            kind,
            behind=(f"off_policy_correction.{kind}_tis_ratio_clip_high",),
        )
        for kind in ("token", "sequence")
    ),
    *(
        _gate(
            "off_policy_correction.sequence_mask_metric",
            metric,
            behind=tuple(f"off_policy_correction.{name}_mask_{end}" for end in ("low", "high")),
        )
        for metric, name in (("geometric", "geo"), ("product", "product"))
    ),
)


def idle_keys(config: RunConfig) -> Iterator[str]:
    """A sentence for each cause; a key that holds its default was not set by anybody."""
    tree = config.model_dump()
    causes: dict[str, str] = {}
    for gate in GATES:
        opens = {f"trainer.{key}": values for key, values in gate.opens.items()}
        if not any(_is_open(value_at(tree, key), values) for key, values in opens.items()):
            cause = " and ".join(_setting(tree, key) for key in opens)
            causes |= {key: cause for key in _set_behind(gate, tree) if key not in causes}
    for cause in dict.fromkeys(causes.values()):
        keys = [key for key in causes if causes[key] == cause]
        does = "does" if len(keys) == 1 else "do"
        yield f"{', '.join(_setting(tree, key) for key in keys)} {does} nothing while {cause}"


def _is_open(value: Any, values: tuple[object, ...]) -> bool:
    if not values:
        return value not in (None, 0)
    return value in values or (_OWN in values and ":" in value)


def _set_behind(gate: Gate, tree: Mapping[str, Any]) -> list[str]:
    names = [f"trainer.{name}" for name in gate.behind]
    behind = (key for key in known_keys() for name in names if f"{key}.".startswith(f"{name}."))
    return [key for key in behind if value_at(tree, key) != default_at(tree, key)]


def _setting(tree: Mapping[str, Any], key: str) -> str:
    value = value_at(tree, key)
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"
