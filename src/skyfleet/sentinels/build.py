"""Build the invariant checker of a run: the invariants that its configuration implies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from skyfleet.algorithms.estimator import Scope
from skyfleet.algorithms.filters import drops_zero_variance
from skyfleet.algorithms.losses.off_policy import active_mask_metrics
from skyfleet.algorithms.registry import get_estimator, get_policy_loss
from skyfleet.config.root import RunConfig
from skyfleet.engines.engine import Engine
from skyfleet.learner.factory import has_exact_logprobs
from skyfleet.learner.learner import Learner
from skyfleet.learner.loss_recorder import LossRecorder
from skyfleet.models.decoder import Decoder
from skyfleet.rollouts.episode import Limits
from skyfleet.sentinels.checker import InvariantChecker, OnWarning
from skyfleet.sentinels.recording_engine import RecordingEngine
from skyfleet.sentinels.registry import build_modes
from skyfleet.sentinels.stages import Invariants

EXACT_GAP, BF16_GAP, OTHER_ENGINE_GAP = 1e-3, 0.03, 0.05
"""Largest mean difference of two computations of a logprob: in float32 or with exact kernels, in
any other bfloat16, and between the learner and another engine."""


def build_checker(
    config: RunConfig,
    decoder: Decoder,
    engines: Sequence[Engine],
    learner: Learner,
    limits: Limits,
    *,
    envs: Collection[str],
    recording_engine: RecordingEngine,
    losses: LossRecorder,
    reference_interval: int,
    on_warning: OnWarning | None = None,
) -> InvariantChecker:
    return InvariantChecker(
        folder=Path(config.trainer.run_path),
        expected=build_invariants(
            config, decoder, limits, envs=envs, reference_interval=reference_interval
        ),
        modes=build_modes(config.trainer.sentinels),
        recording_engine=recording_engine,
        losses=losses,
        learner=learner,
        engines=engines,
        on_warning=on_warning,
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
    penalizes_length = algorithm.overlong_buffer_len is not None
    rules = trainer.fully_async
    max_staleness = rules.max_staleness_steps if rules.enabled else 0
    refills = rules.enabled and rules.sample_full_batch
    own_gap = EXACT_GAP if has_exact_logprobs(decoder) else BF16_GAP
    return Invariants(
        n_samples=generator.n_samples_per_prompt,
        batch_size=trainer.train_batch_size,
        limits=limits,
        envs=frozenset(envs),
        # Groups that are trained as they finish are no batch of the sampler.
        min_per_env=trainer.min_samples_per_env
        if trainer.use_hybrid_env_sampling and not (max_staleness or refills)
        else 0,
        dynamic_sampling=dynamic,
        drops_equal_rewards=drops_zero_variance(config) or dynamic is not None,
        tolerance=algorithm.zero_variance_filter_tol,
        mask_unfinished=generator.apply_overlong_filtering,
        changes_rewards=generator.zero_reward_on_non_stop or penalizes_length,
        step_wise=generator.step_wise_trajectories,
        centred=_loop_centred(config),
        unit_deviation=get_estimator(algorithm.advantage_estimator).unit_deviation(algorithm),
        mini_batch_size=trainer.policy_mini_batch_size,
        update_epochs=trainer.update_epochs_per_batch,
        learner_centred=_learner_centred(config),
        min_probability_mass=_min_probability_mass(config),
        logprob_tolerance=own_gap if generator.backend == "embedded" else OTHER_ENGINE_GAP,
        reference_tolerance=own_gap,
        own_reference=trainer.ref.model.path == trainer.policy.model.path,
        reference_interval=reference_interval,
        filter_metrics=active_filter_metrics(config),
        max_staleness=max_staleness,
        refills=refills,
    )


def active_filter_metrics(config: RunConfig) -> tuple[str, ...]:
    """The metrics of the filters, masks and caps that are on: one that stays 0 never acts."""
    algorithm = config.trainer.algorithm
    drops_equal = drops_zero_variance(config) or algorithm.dynamic_sampling.type is not None
    filters = {
        "filter/zero_variance": drops_equal,
        "filter/punished": algorithm.overlong_buffer_len is not None,
        "filter/overlong": config.generator.apply_overlong_filtering,
    }
    loss = get_policy_loss(algorithm.policy_loss_type)
    names = (*loss.filter_metrics, *active_mask_metrics(algorithm.off_policy_correction))
    return (*(key for key, on in filters.items() if on), *(f"policy/{name}" for name in names))


def _min_probability_mass(config: RunConfig) -> float | None:
    sampling = config.generator.sampling_params
    if sampling.temperature != config.trainer.algorithm.temperature:
        return None
    if not sampling.truncates:
        return 1.0
    top_p_alone = sampling.top_k < 1 and not sampling.min_p
    return sampling.top_p if top_p_alone else 0.0


def _learner_centred(config: RunConfig) -> Scope | None:
    """Over what the advantages are centred that the learner computes; None if it computes none."""
    algorithm = config.trainer.algorithm
    estimator = get_estimator(algorithm.advantage_estimator)
    if estimator.needs_critic:
        return estimator.centred
    if not algorithm.use_kl_in_reward:
        return None
    return "batch" if algorithm.advantage_batch_normalize else estimator.centred


def _loop_centred(config: RunConfig) -> Scope | None:
    """Over what the advantages are centred that the training loop computes."""
    algorithm = config.trainer.algorithm
    estimator = get_estimator(algorithm.advantage_estimator)
    if algorithm.use_kl_in_reward:
        # The learner computes them again; before it, only group advantages are complete.
        return "group" if estimator.centred == "group" else None
    if algorithm.advantage_batch_normalize:
        return "batch"
    return None if estimator.needs_critic else estimator.centred
