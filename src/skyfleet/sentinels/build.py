"""Build the invariant checker of a run: which invariants its configuration promises."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from skyfleet.config.root import RunConfig
from skyfleet.engines.engine import Engine
from skyfleet.learner.factory import is_exact
from skyfleet.learner.single import SingleLearner
from skyfleet.models.decoder import Decoder
from skyfleet.rollouts.episode import Limits
from skyfleet.sentinels.checker import InvariantChecker
from skyfleet.sentinels.invariants import Invariants
from skyfleet.sentinels.loss_recorder import LossRecorder
from skyfleet.sentinels.recording_engine import RecordingEngine
from skyfleet.sentinels.registry import build_modes

EXACT_GAP, COARSE_GAP, FOREIGN_GAP = 1e-3, 0.03, 0.05
"""How far two ways of computing one logprob lie apart at most, on average: where they are shown to be
alike, in any other bfloat16, and where an engine computes in its own way."""


def build_checker(
    config: RunConfig,
    decoder: Decoder,
    engines: Sequence[Engine],
    learner: SingleLearner,
    limits: Limits,
    *,
    envs: Collection[str],
    witness: RecordingEngine,
    losses: LossRecorder,
    reference_interval: int,
) -> InvariantChecker:
    return InvariantChecker(
        folder=Path(config.trainer.run_path),
        expected=build_invariants(
            config, decoder, limits, envs=envs, reference_interval=reference_interval
        ),
        modes=build_modes(config.trainer.sentinels),
        witness=witness,
        losses=losses,
        learner=learner,
        engines=engines,
    )


def build_invariants(
    config: RunConfig,
    decoder: Decoder,
    limits: Limits,
    *,
    envs: Collection[str],
    reference_interval: int,
) -> Invariants:
    trainer, generator = config.trainer, config.generator
    algorithm = trainer.algorithm
    dynamic = algorithm.dynamic_sampling.type
    punished = algorithm.overlong_buffer_len is not None
    own_gap = EXACT_GAP if is_exact(decoder) else COARSE_GAP
    return Invariants(
        n_samples=generator.n_samples_per_prompt,
        batch_size=trainer.train_batch_size,
        limits=limits,
        envs=frozenset(envs),
        min_per_env=trainer.min_samples_per_env if trainer.use_hybrid_env_sampling else 0,
        dynamic_sampling=dynamic,
        drops_equal_rewards=algorithm.zero_variance_filter or dynamic is not None,
        tolerance=algorithm.zero_variance_filter_tol,
        mask_unfinished=generator.apply_overlong_filtering,
        changes_rewards=generator.zero_reward_on_non_stop or punished,
        step_wise=generator.step_wise_trajectories,
        centred=_centred(config),
        unit_deviation=algorithm.advantage_estimator == "grpo" and algorithm.grpo_norm_by_std,
        mini_batch_size=trainer.policy_mini_batch_size,
        update_epochs=trainer.update_epochs_per_batch,
        credited_again=_credited_again(config),
        least_mass=_least_mass(config),
        logprob_tolerance=own_gap if generator.backend == "embedded" else FOREIGN_GAP,
        reference_tolerance=own_gap,
        own_reference=trainer.ref.model.path == trainer.policy.model.path,
        reference_interval=reference_interval,
        acting=acting_of(config),
    )


def acting_of(config: RunConfig) -> tuple[str, ...]:
    """What tells that each filter, mask and cap that is on has something to do."""
    algorithm = config.trainer.algorithm
    rules = algorithm.off_policy_correction
    outliers = (rules.outlier_token_is_threshold_low, rules.outlier_token_is_threshold_high)
    varied = algorithm.zero_variance_filter or algorithm.dynamic_sampling.type is not None
    acting = {
        "filter/zero_variance": varied,
        "filter/punished": algorithm.overlong_buffer_len is not None,
        "filter/overlong": config.generator.apply_overlong_filtering,
        "policy/clip_cov_ratio": algorithm.policy_loss_type == "clip_cov",
        "policy/tis_token_clip_high_ratio": rules.tis_ratio_type == "token",
        "policy/tis_seq_clip_high_ratio": rules.tis_ratio_type == "sequence",
        "policy/geo_sequence_mask_masked_ratio": rules.sequence_mask_metric == "geometric",
        "policy/product_sequence_mask_masked_ratio": rules.sequence_mask_metric == "product",
        "policy/outlier_seq_masked_ratio": outliers != (None, None),
        "policy/token_mask_ratio": rules.token_mask_is_threshold_low is not None
        and rules.token_mask_is_threshold_high is not None,
    }
    return tuple(key for key, on in acting.items() if on)


def _least_mass(config: RunConfig) -> float | None:
    sampling = config.generator.sampling_params
    if sampling.temperature != config.trainer.algorithm.temperature:
        return None
    if not sampling.truncates:
        return 1.0
    top_p_alone = sampling.top_k < 1 and not sampling.min_p
    return sampling.top_p if top_p_alone else 0.0


def _credited_again(config: RunConfig) -> Literal["group", "batch"] | None:
    algorithm = config.trainer.algorithm
    if algorithm.advantage_estimator == "gae":
        return "batch"
    if not algorithm.use_kl_in_reward:
        return None
    if algorithm.advantage_estimator == "reinforce++" or algorithm.advantage_batch_normalize:
        return "batch"
    return "group" if algorithm.advantage_estimator in ("grpo", "rloo") else None


def _centred(config: RunConfig) -> Literal["group", "batch"] | None:
    """Over what the configured estimator's advantages sum to zero, as the loop gets them."""
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_in_reward and algorithm.advantage_estimator not in ("grpo", "rloo"):
        return None  # credited once more, by the learner
    if algorithm.advantage_batch_normalize and not algorithm.use_kl_in_reward:
        return "batch"
    known: dict[str, Literal["group", "batch"]] = {
        "grpo": "group",
        "rloo": "group",
        "maxrl": "group",
        "reinforce++": "batch",
    }
    return known.get(algorithm.advantage_estimator)
