"""Warnings: settings that run but have no effect, or that are rarely intended.

Those that depend on the estimator or the loss are in `skyfleet.algorithms.validation`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from skyfleet.config.keys import default_at, known_keys, value_at
from skyfleet.config.root import RunConfig
from skyfleet.config.skyrl_compat import VALUES_WITHOUT_EFFECT
from skyfleet.config.validation import get_native_flags
from skyfleet.redaction import redact


def find_warnings(config: RunConfig) -> list[str]:
    """One sentence per warning, for the start of a run."""
    return [sentence for warn in WARNINGS for sentence in warn(config)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """Keys that are read only under some values of other keys. Names are relative to `trainer`."""

    enabled_by: Mapping[str, tuple[object, ...]]
    """Key -> the values that enable `keys`; one such key is enough, () is any value but null and 0."""
    keys: tuple[str, ...]
    """A section stands for all its keys."""


def _depend(key: str, *values: object, keys: tuple[str, ...]) -> Dependency:
    return Dependency(
        enabled_by={f"algorithm.{key}": values}, keys=tuple(f"algorithm.{name}" for name in keys)
    )


# A key with several dependencies is reported for the first that is not met.
DEPENDENCIES: tuple[Dependency, ...] = (
    Dependency(
        enabled_by={"algorithm.use_kl_loss": (True,), "algorithm.use_kl_in_reward": (True,)},
        keys=(
            *("algorithm.kl_loss_coef", "algorithm.kl_estimator_type", "algorithm.kl_ctrl"),
            *("ref.model.path", "ref.fsdp_config", "update_ref_every_epoch"),
        ),
    ),
    _depend("use_kl_in_reward", True, keys=("kl_ctrl",)),
    _depend("kl_ctrl.type", "adaptive", keys=("kl_ctrl",)),
    _depend("use_entropy_loss", True, keys=("entropy_loss_coef",)),
    Dependency(
        enabled_by={"alerts.slack_channel": (), "alerts.webhook_url": ()},
        keys=("alerts.dollars_per_hour",),
    ),
    Dependency(
        enabled_by={"policy.model.lora.rank": ()},
        keys=tuple(
            f"policy.model.lora.{name}" for name in ("alpha", "target_modules", "exclude_modules")
        ),
    ),
    Dependency(
        enabled_by={
            "algorithm.zero_variance_filter": (True,),
            "algorithm.dynamic_sampling.type": (),
        },
        keys=("algorithm.zero_variance_filter_tol",),
    ),
    _depend("dynamic_sampling.type", keys=("dynamic_sampling.max_sample_batches",)),
    _depend("dynamic_sampling.type", "replace", keys=("dynamic_sampling.min_replace_ratio",)),
    _depend("overlong_buffer_len", keys=("overlong_max_len", "overlong_buffer_penalty_factor")),
    _depend("loss_reduction", "seq_mean_token_sum_norm", keys=("max_seq_len",)),
    *(
        _depend(
            "off_policy_correction.tis_ratio_type",
            kind,
            keys=(f"off_policy_correction.{kind}_tis_ratio_clip_high",),
        )
        for kind in ("token", "sequence")
    ),
    *(
        _depend(
            "off_policy_correction.sequence_mask_metric",
            metric,
            keys=tuple(f"off_policy_correction.{name}_mask_{end}" for end in ("low", "high")),
        )
        for metric, name in (("geometric", "geo"), ("product", "product"))
    ),
)


def warn_unused_keys(config: RunConfig) -> Iterator[str]:
    """One sentence per cause; a key that holds its default counts as not set."""
    tree = config.model_dump()
    causes: dict[str, str] = {}
    for dependency in DEPENDENCIES:
        enabled_by = {f"trainer.{key}": values for key, values in dependency.enabled_by.items()}
        if not any(_is_enabled(value_at(tree, key), values) for key, values in enabled_by.items()):
            cause = " and ".join(_format_setting(key, value_at(tree, key)) for key in enabled_by)
            causes |= {key: cause for key in _find_set_keys(dependency, tree) if key not in causes}
    for cause in dict.fromkeys(causes.values()):
        keys = [key for key in causes if causes[key] == cause]
        yield _format_no_effect({key: value_at(tree, key) for key in keys}) + f" while {cause}"


def _is_enabled(value: Any, values: tuple[object, ...]) -> bool:
    if not values:
        return value not in (None, 0)
    return value in values


def _find_set_keys(dependency: Dependency, tree: Mapping[str, Any]) -> list[str]:
    names = [f"trainer.{name}" for name in dependency.keys]
    keys = (key for key in known_keys() for name in names if f"{key}.".startswith(f"{name}."))
    return [key for key in keys if value_at(tree, key) != default_at(tree, key)]


def warn_values_without_effect(config: RunConfig) -> Iterator[str]:
    """One sentence per reason, with every key of SkyRL that it concerns."""
    tree, known = config.model_dump(mode="json"), known_keys()
    backend, strategy = config.generator.engine_kind, config.trainer.strategy
    settings: dict[str, dict[str, Any]] = {}
    for rule in VALUES_WITHOUT_EFFECT:
        if rule.with_ray and config.trainer.placement.use_ray:
            continue
        if rule.key in config.ignored_keys:
            settings.setdefault(rule.remedy, {})[rule.key] = config.ignored_keys[rule.key]
        elif rule.key in known:
            value = value_at(tree, rule.key)
            if not rule.supports(value, default_at(tree, rule.key), backend, strategy):
                settings.setdefault(rule.remedy, {})[rule.key] = value
    for remedy, values in settings.items():
        yield f"{_format_no_effect(values)}: {remedy}"


def _format_no_effect(settings: Mapping[str, Any]) -> str:
    verb = "has" if len(settings) == 1 else "have"
    return f"{', '.join(_format_setting(*item) for item in settings.items())} {verb} no effect"


def _format_setting(key: str, value: Any) -> str:
    return redact(f"{key}={value if isinstance(value, str) else json.dumps(value)}")


def warn_native_tool_calling(config: RunConfig) -> Iterator[str]:
    """SkyRL's recipes set one of the two flags, and run without the other."""
    flags = get_native_flags(config)
    if any(flags.values()) and not all(flags.values()):
        on, off = sorted(flags, key=lambda key: not flags[key])
        yield f"{on}=true has no effect while {off}=false: the renderer writes the tools; set both"


def warn_greedy_evaluation(config: RunConfig) -> Iterator[str]:
    n, sampling = config.generator.eval_n_samples_per_prompt, config.generator.eval_sampling_params
    if n > 1 and (greedy := sampling.greedy_setting):
        yield (
            f"generator.eval_n_samples_per_prompt={n} with generator.eval_sampling_params.{greedy} "
            f"samples the same attempt {n} times, so pass@{n} equals pass@1; set "
            "generator.eval_n_samples_per_prompt=1, or "
            "generator.eval_sampling_params.temperature=1 without top_k"
        )


def warn_temperatures_differ(config: RunConfig) -> Iterator[str]:
    learner, engine = config.trainer.algorithm, config.generator.sampling_params
    if learner.temperature != engine.temperature:
        yield (
            f"trainer.algorithm.temperature={learner.temperature} and "
            f"generator.sampling_params.temperature={engine.temperature}: the updated policy is not "
            "the sampled one, nothing corrects for the difference, and the sentinel logprob_gap is "
            "off; leave trainer.algorithm.temperature out"
        )


def warn_adapted_random_weights(config: RunConfig) -> Iterator[str]:
    model = config.trainer.policy.model
    if model.lora.rank and model.path == "tiny":
        yield (
            f"trainer.policy.model.lora.rank={model.lora.rank} adapts the random weights of "
            "trainer.policy.model.path=tiny, which stay as they are; to train them, set the rank to 0"
        )


WARNINGS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    warn_values_without_effect,
    warn_unused_keys,
    warn_greedy_evaluation,
    warn_temperatures_differ,
    warn_adapted_random_weights,
)
