"""Validation of a configuration against the facts of its estimator and its policy loss; needs no torch.

Checks that need no algorithm object are in `skyfleet.config.algorithm` and `skyfleet.config.validation`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from skyfleet.algorithms.estimator import (
    ESTIMATOR_KEY,
    AdvantageEstimator,
    find_equal_rewards_filter,
)
from skyfleet.algorithms.losses.loss import LOSS_KEY, PolicyLoss
from skyfleet.algorithms.registry import (
    built_in_estimators,
    built_in_losses,
    find_estimator,
    find_policy_loss,
    get_estimator,
)
from skyfleet.config.keys import default_at, known_keys, value_at
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError

KWARGS_KEYS = ("algorithm.advantage_estimator_kwargs", "algorithm.policy_loss_kwargs")


def check_algorithm(config: RunConfig) -> None:
    """Raise one ConfigError that names everything the estimator and the loss cannot run with."""
    if errors := algorithm_errors(config):
        raise ConfigError("\n".join(errors))


def algorithm_errors(config: RunConfig) -> list[str]:
    """One sentence per error. Imports a user's estimator, but not a user's loss, which needs torch."""
    algorithm = config.trainer.algorithm
    estimator = get_estimator(algorithm.advantage_estimator)
    errors = [*_critic_errors(config, estimator), *_masked_attempt_errors(config, estimator)]
    errors += estimator.errors(config)
    loss = find_policy_loss(algorithm.policy_loss_type)
    errors += _engine_logprob_errors(config, loss)
    if loss is not None:
        errors += [*_correction_errors(config, loss), *loss.errors(config)]
    errors += [*_staleness_errors(config, loss), *_quantization_errors(config, loss)]
    return errors


def algorithm_warnings(config: RunConfig) -> list[str]:
    """What runs and is rarely intended: unused keys, and settings that defeat the algorithm.

    Imports no module of the user, whose estimator or loss has no known facts.
    """
    algorithm = config.trainer.algorithm
    estimator = find_estimator(algorithm.advantage_estimator)
    loss = find_policy_loss(algorithm.policy_loss_type)
    warnings = [*unused_algorithm_keys(config), *_group_warnings(config)]
    for component in (estimator, loss):
        if component is not None:
            warnings += component.warnings(config)
    return warnings


def unused_algorithm_keys(config: RunConfig) -> Iterator[str]:
    """One sentence per component for keys that were set and that the configured one does not read."""
    algorithm, tree = config.trainer.algorithm, config.model_dump()
    estimator = find_estimator(algorithm.advantage_estimator)
    loss = find_policy_loss(algorithm.policy_loss_type)
    estimator_keys = {key for each in built_in_estimators() for key in each.reads}
    loss_keys = {key for each in built_in_losses() for key in each.reads}
    # An object in a user's module reads its kwargs.
    estimator_reads = estimator.reads if estimator else KWARGS_KEYS
    loss_reads = loss.reads if loss else KWARGS_KEYS
    yield from _unused(tree, {*estimator_keys, KWARGS_KEYS[0]}, estimator_reads, ESTIMATOR_KEY)
    yield from _unused(tree, {*loss_keys, KWARGS_KEYS[1]}, loss_reads, LOSS_KEY)


def _unused(
    tree: Mapping[str, Any], owned: Collection[str], reads: Collection[str], cause: str
) -> Iterator[str]:
    """A key that holds its default counts as not set; a section stands for all its keys."""
    unread = [f"trainer.{name}" for name in owned if name not in reads]
    unused = [
        key
        for key in known_keys()
        if any(f"{key}.".startswith(f"{name}.") for name in unread)
        and value_at(tree, key) != default_at(tree, key)
    ]
    if unused:
        verb = "has" if len(unused) == 1 else "have"
        settings = ", ".join(_setting(tree, key) for key in unused)
        yield f"{settings} {verb} no effect while {_setting(tree, cause)}"


def _setting(tree: Mapping[str, Any], key: str) -> str:
    value = value_at(tree, key)
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _critic_errors(config: RunConfig, estimator: AdvantageEstimator) -> Iterator[str]:
    trainer, path = config.trainer, config.trainer.critic.model.path
    name = trainer.algorithm.advantage_estimator
    if not estimator.needs_critic:
        if path is not None:
            yield (
                f"trainer.critic.model.path={path!r}, but {ESTIMATOR_KEY}={name} uses no critic; "
                "unset it or use gae"
            )
        return
    if path is None:
        yield (
            f"{ESTIMATOR_KEY}={name} needs a critic, but trainer.critic.model.path is unset; set "
            f"it, for example to the policy's: {trainer.policy.model.path}"
        )
    if config.generator.step_wise_trajectories:
        yield (
            "generator.step_wise_trajectories=true splits an attempt into turns, but "
            f"{ESTIMATOR_KEY}={name} needs the whole attempt; set it to false"
        )
    batch, mini = trainer.train_batch_size, trainer.critic_mini_batch_size
    if batch % mini:
        yield (
            f"trainer.train_batch_size={batch} is not a multiple of "
            f"trainer.critic_mini_batch_size={mini}; set that to a divisor of {batch}"
        )


def _masked_attempt_errors(config: RunConfig, estimator: AdvantageEstimator) -> Iterator[str]:
    """The KL penalty of an attempt left out of the loss is unknown, but its reward counts."""
    algorithm = config.trainer.algorithm
    is_group = estimator.scope == "group"
    if config.generator.apply_overlong_filtering and algorithm.use_kl_in_reward and is_group:
        yield (
            "generator.apply_overlong_filtering=true with trainer.algorithm.use_kl_in_reward=true: "
            "attempts left out of the loss would pay no KL and raise the mean of their group; "
            "set trainer.algorithm.use_kl_loss=true and use_kl_in_reward=false"
        )


def _correction_errors(config: RunConfig, loss: PolicyLoss) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    name, rules = algorithm.policy_loss_type, algorithm.off_policy_correction
    prefix = "trainer.algorithm.off_policy_correction"
    if rules.active and loss.build_selector:
        yield (
            f"{prefix} is set, but {LOSS_KEY}={name} compares uncorrected tokens; unset the "
            "correction or choose another loss"
        )
    if rules.tis_ratio_type and loss.ratio_to(algorithm) == "engine":
        alternative = f" or set {loss.old_ratio_setting}" if loss.old_ratio_setting else ""
        yield (
            f"{prefix}.tis_ratio_type={rules.tis_ratio_type} and {LOSS_KEY}={name} both weight by "
            "the ratio to the engine's logprobs, which would count squared; unset "
            f"tis_ratio_type{alternative}"
        )


def _engine_logprob_errors(config: RunConfig, loss: PolicyLoss | None) -> Iterator[str]:
    """After top-p, top-k or min-p the engine's logprobs are of a part of the vocabulary."""
    algorithm, sampling = config.trainer.algorithm, config.generator.sampling_params
    if not sampling.truncates and sampling.temperature == algorithm.temperature:
        return
    to_engine = loss is not None and loss.ratio_to(algorithm) == "engine"
    if to_engine or algorithm.off_policy_correction.active:
        yield (
            f"{LOSS_KEY}={algorithm.policy_loss_type} or its off_policy_correction compares the "
            "learner's logprobs with the engine's, which sampled from a part of the vocabulary or at "
            "another temperature; set generator.sampling_params.top_p=1, top_k=-1 and min_p=0, and "
            "leave trainer.algorithm.temperature out"
        )


def _staleness_errors(config: RunConfig, loss: PolicyLoss | None) -> Iterator[str]:
    """Tokens of an earlier policy need the ratio of the learner's logprobs to the engine's."""
    rules, algorithm = config.trainer.fully_async, config.trainer.algorithm
    if not rules.enabled or not rules.max_staleness_steps:
        return
    key = f"trainer.fully_async.max_staleness_steps={rules.max_staleness_steps}"
    sampling = config.generator.sampling_params
    if sampling.truncates or sampling.temperature != algorithm.temperature:
        yield (
            f"{key} weights stale tokens by the ratio of the learner's to the engine's logprobs, and "
            "the engine sampled from a part of the vocabulary or at another temperature; set "
            "generator.sampling_params.top_p=1, top_k=-1 and min_p=0 and leave "
            "trainer.algorithm.temperature out, or set max_staleness_steps=0"
        )
    if loss is not None and loss.build_selector:
        yield (
            f"{key}, but {LOSS_KEY}={algorithm.policy_loss_type} takes no correction for stale "
            "tokens; choose another loss, such as regular, or set max_staleness_steps=0"
        )


def _quantization_errors(config: RunConfig, loss: PolicyLoss | None) -> Iterator[str]:
    """vLLM samples from rounded weights, so its logprobs are of another policy than the learner's."""
    generator, algorithm = config.generator, config.trainer.algorithm
    method = generator.engine_init_kwargs.get("quantization")
    if method is None or generator.backend != "vllm" or algorithm.off_policy_correction.active:
        return
    if loss is not None and loss.ratio_to(algorithm) == "old":
        yield (
            f"generator.engine_init_kwargs.quantization={method!r} samples from rounded weights, and "
            f"{LOSS_KEY}={algorithm.policy_loss_type} takes its samples for the learner's own; set "
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token"
        )


def correct_stale_samples(config: RunConfig) -> RunConfig:
    """With samples of earlier policies and no correction configured: token TIS.

    With old logprobs of the policy before the step this is decoupled PPO (AReaL, arXiv 2505.24298)
    with a truncated weight. A loss whose ratio is to the engine's logprobs needs no other.
    """
    rules, algorithm = config.trainer.fully_async, config.trainer.algorithm
    correction, loss = algorithm.off_policy_correction, find_policy_loss(algorithm.policy_loss_type)
    is_stale = rules.enabled and rules.max_staleness_steps > 0
    has_old_ratio = loss is None or (loss.ratio_to(algorithm) == "old" and not loss.build_selector)
    if not is_stale or correction.active or not has_old_ratio:
        return config
    changed = algorithm.model_copy(
        update={"off_policy_correction": correction.model_copy(update={"tis_ratio_type": "token"})}
    )
    trainer = config.trainer.model_copy(update={"algorithm": changed})
    return config.model_copy(update={"trainer": trainer})


def _group_warnings(config: RunConfig) -> Iterator[str]:
    name = config.trainer.algorithm.advantage_estimator
    estimator, n = find_estimator(name), config.generator.n_samples_per_prompt
    if estimator is None:
        return
    if n < estimator.min_group_size:
        yield (
            f"generator.n_samples_per_prompt={n} with {ESTIMATOR_KEY}={name}: an attempt is "
            "compared with the other attempts at its task, and there are none; set it to "
            f"{estimator.min_group_size} or more"
        )
    # An estimator that compares with the batch or a critic learns from such groups too.
    dropping = find_equal_rewards_filter(config)
    if dropping and estimator.scope == "batch" and not estimator.needs_teacher:
        critic = " and its critic" if estimator.needs_critic else ""
        yield (
            f"{dropping} drops groups whose attempts all earned the same reward, from which "
            f"{ESTIMATOR_KEY}={name}{critic} would learn too; unset it"
        )
