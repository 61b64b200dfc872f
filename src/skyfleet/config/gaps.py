"""Gaps: keys whose values load but do not all run yet; support is added by deleting a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    key: str
    works: tuple[object, ...] = ()
    """Values that run; empty stands for the default alone."""
    or_named: bool = False
    """Whatever is named as `module:function` runs too."""
    instead: str


# Read by engines in other processes; the embedded engine has nothing to do with them.
_ENGINE_KEYS = (
    "run_engines_locally",
    "async_engine",
    "weight_sync_backend",
    "model_dtype",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "language_model_only",
    "engine_init_kwargs",
    "reasoning_parser",
)

_DEVICE_KEYS = (
    "trainer.placement.colocate_all",
    "trainer.placement.colocate_policy_ref",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node",
    "trainer.placement.ref_num_nodes",
    "trainer.placement.ref_num_gpus_per_node",
    "generator.num_inference_engines",
    "generator.inference_engine_tensor_parallel_size",
    "generator.inference_engine_pipeline_parallel_size",
    "generator.inference_engine_expert_parallel_size",
    "generator.inference_engine_data_parallel_size",
)

_SPEED_KEYS = (
    "trainer.gradient_checkpointing",
    "trainer.flash_attn",
    "trainer.remove_microbatch_padding",
    "trainer.loss_chunk_size",
)


def _gap(key: str, *works: object, instead: str, or_named: bool = False) -> Gap:
    return Gap(key=key, works=works, instead=instead, or_named=or_named)


_ALGORITHM = (
    _gap(
        "trainer.algorithm.advantage_estimator",
        *("grpo", "rloo", "maxrl", "reinforce++", "distillation"),
        or_named=True,
        instead="gae needs a critic, and no critic is trained here; use grpo or reinforce++",
    ),
    _gap("trainer.algorithm.value_clip", instead="it belongs to a critic; leave it out"),
    _gap(
        "trainer.algorithm.temperature", instead="train at the sampling temperature: leave it out"
    ),
)

_TRAINER = (
    _gap("trainer.strategy", "single", instead="one device trains; use single"),
    _gap("trainer.rope_scaling", None, instead="stay within the model's own context"),
    _gap("trainer.policy.model.lora.rank", instead="train every weight: use 0"),
    _gap("trainer.policy.language_model_only", instead="models have no vision tower; leave it out"),
    _gap("trainer.ref.language_model_only", instead="models have no vision tower; leave it out"),
    _gap("trainer.policy.optimizer_config.scheduler", instead="use constant_with_warmup"),
    _gap("trainer.policy.track_extra_gradient_metrics", instead="read the global norm; use false"),
    _gap("trainer.update_ref_every_epoch", instead="the reference stays; use false"),
    _gap("trainer.hf_save_interval", instead="read the checkpoints; use -1"),
    _gap("trainer.print_example_interval", instead="read the run's episodes; use -1"),
    _gap("trainer.dump_data_batch", instead="read the run's episodes; use false"),
    _gap(
        "trainer.dump_training_trajectories", instead="training episodes are always kept; use false"
    ),
)

_GENERATOR = (
    _gap("generator.backend", "embedded", instead="use embedded"),
    _gap("generator.use_native_tool_calling", instead="calls are parsed here; use false"),
    _gap("generator.batched", instead="episodes run side by side; use false"),
    _gap("generator.use_conversation_multi_turn", instead="each turn is a message; use true"),
    _gap("generator.inject_context_status", instead="use false"),
    _gap("generator.context_warning_threshold", instead="nobody is warned; leave it out"),
)

_WORLD = (
    _gap(
        "environment.skyrl_gym.fleet_task.tasks_file",
        instead="rows carry their verifiers; name the file in data.train_data",
    ),
    _gap(
        "environment.skyrl_gym.fleet_task.enable_context_tools",
        instead="history is never cut; use false",
    ),
    _gap("environment.skyrl_gym.fleet_task.enable_hints", instead="nobody is told more; use false"),
    _gap(
        "environment.skyrl_gym.tau_bench.use_native_tool_calling",
        instead="calls are parsed here; use false",
    ),
)

GAPS: tuple[Gap, ...] = (
    *_ALGORITHM,
    *_TRAINER,
    *_GENERATOR,
    *_WORLD,
    *(_gap(key, instead="one process, one device; leave it out") for key in _DEVICE_KEYS),
    *(_gap(key, instead="it has no effect here; leave it out") for key in _SPEED_KEYS),
    *(
        _gap(f"generator.{key}", instead="the embedded engine has no use for it; leave it out")
        for key in _ENGINE_KEYS
    ),
)
