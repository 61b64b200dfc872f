"""SkyRL compatibility: other spellings of a key, and SkyRL's keys and values that do not run here.

Support for a value is added by deleting its row.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from fnmatch import fnmatchcase

# Newer SkyRL keeps these under generator.inference_engine; the flat name is the same.
_MOVED = (
    "async_engine",
    "backend",
    "delta_weight_sync",
    "enable_chunked_prefill",
    "enable_http_endpoint",
    "enable_prefix_caching",
    "enable_ray_prometheus_stats",
    "enforce_eager",
    "engine_init_kwargs",
    "external_proxy_url",
    "external_server_urls",
    "fully_sharded_loras",
    "gpu_memory_utilization",
    "http_endpoint_host",
    "http_endpoint_port",
    "language_model_only",
    "max_num_batched_tokens",
    "max_num_seqs",
    "model_dtype",
    "override_existing_update_group",
    "run_engines_locally",
    "served_model_name",
    "vllm_v1_disable_multiproc",
    "weight_sync_backend",
    "weight_transfer_threshold_cuda_ipc_GB",
)

_RENAMED = {
    "num_engines": "num_inference_engines",
    "tensor_parallel_size": "inference_engine_tensor_parallel_size",
    "pipeline_parallel_size": "inference_engine_pipeline_parallel_size",
    "expert_parallel_size": "inference_engine_expert_parallel_size",
    "data_parallel_size": "inference_engine_data_parallel_size",
    "remote_urls": "remote_inference_engine_urls",
}

_TIS = "trainer.algorithm.off_policy_correction"

ALIASES: dict[str, str] = {
    **{f"generator.inference_engine.{name}": f"generator.{name}" for name in _MOVED},
    **{f"generator.inference_engine.{new}": f"generator.{old}" for new, old in _RENAMED.items()},
    "trainer.use_sample_packing": "trainer.remove_microbatch_padding",
    "trainer.log_example_interval": "trainer.print_example_interval",
    "trainer.target_modules": "trainer.policy.model.lora.target_modules",
    "trainer.exclude_modules": "trainer.policy.model.lora.exclude_modules",
    "trainer.algorithm.use_tis": f"{_TIS}.tis_ratio_type",
    "trainer.algorithm.tis_imp_ratio_cap": f"{_TIS}.token_tis_ratio_clip_high",
}
"""SkyRL's other spelling of a key -> the spelling used here, which is Fleet's flat one."""

VALUE_ALIASES: dict[tuple[str, Hashable], Hashable] = {
    ("trainer.strategy", "fsdp2"): "fsdp",
    ("trainer.resume_mode", None): "none",
    (f"{_TIS}.tis_ratio_type", True): "token",
    (f"{_TIS}.tis_ratio_type", False): None,
    (f"{_TIS}.token_tis_ratio_clip_high", -1): 2.0,  # SkyRL's "unset"
}


def canonical_key(path: tuple[str, ...]) -> tuple[str, ...]:
    """The same key in the spelling used here; keys below a moved mapping move with it."""
    for end in range(len(path), 0, -1):
        if alias := ALIASES.get(".".join(path[:end])):
            return (*alias.split("."), *path[end:])
    return path


def canonical_value(key: str, value: object) -> object:
    return VALUE_ALIASES.get((key, value), value) if isinstance(value, Hashable) else value


def other_spellings(key: str) -> list[str]:
    return [other for other, canonical in ALIASES.items() if canonical == key]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedValue:
    """A key of which only some values run, or have an effect."""

    key: str
    supported: tuple[object, ...] = ()
    """Values that run; empty means the default only."""
    backends: tuple[str, ...] = ()
    """With these values of generator.backend every value runs; any server counts as openai."""
    strategies: tuple[str, ...] = ()
    """With these values of trainer.strategy every value has an effect."""
    with_ray: bool = False
    """With trainer.placement.use_ray every value has an effect."""
    remedy: str

    def supports(self, value: object, default: object, backend: str, strategy: str = "") -> bool:
        if backend in self.backends or strategy in self.strategies:
            return True
        return value in (self.supported or (default,))


def _value(
    key: str, *supported: object, remedy: str, backends: tuple[str, ...] = ()
) -> UnsupportedValue:
    return UnsupportedValue(key=key, supported=supported, remedy=remedy, backends=backends)


_SERVERS = (
    "servers: generator.backend=vllm with run_engines_locally=false, or for inference only "
    "generator.backend=openai"
)
_ONLY_VLLM = "only a vLLM engine started here reads it; set generator.backend=vllm or leave it out"

UNSUPPORTED_VALUES: tuple[UnsupportedValue, ...] = (
    _value(
        "trainer.strategy",
        "single",
        "fsdp",
        remedy="Megatron is not supported; use trainer.strategy=single or fsdp",
    ),
    _value(
        "trainer.policy.model.lora.dropout",
        remedy="the engine samples without dropout, so it would sample from another policy; use 0",
    ),
    _value("trainer.policy.model.lora.init_method", "kaiming", remedy="use kaiming"),
    *(
        _value(
            f"generator.{name}.logprobs",
            *(None, 0, 1),
            remedy="the sampled token's log-probability is always recorded; use 1",
        )
        for name in ("sampling_params", "eval_sampling_params")
    ),
    _value(
        "generator.run_engines_locally",
        backends=("vllm", "openai"),
        remedy=f"the embedded engine runs in this process; use true, or {_SERVERS}",
    ),
    _value("generator.model_dtype", backends=("vllm",), remedy=_ONLY_VLLM),
    _value("generator.engine_init_kwargs", backends=("vllm",), remedy=_ONLY_VLLM),
    _value(
        "environment.skyrl_gym.fleet_task.enable_hints",
        False,
        remedy="a failed task is not retried with a hint; use false",
    ),
)
"""A run with another value would give other results, so it is refused."""

_ONE_DEVICE = "training uses one process on one device; trainer.strategy=fsdp uses several"
_SAME_RANKS = "the critic and the reference model are divided over the policy's ranks"
_LEARNER_WEIGHTS = "the embedded engine uses the learner's own weights"
_NO_VISION = "no vision tower is loaded"
_SAME_RANKS_KEYS = (
    "trainer.placement.colocate_policy_ref",
    "trainer.placement.ref_num_nodes",
    "trainer.placement.ref_num_gpus_per_node",
    "trainer.placement.critic_num_nodes",
    "trainer.placement.critic_num_gpus_per_node",
)
_SHARDING_KEYS = (
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node",
    "trainer.placement.rank_timeout_seconds",
    "trainer.policy.fsdp_config.cpu_offload",
    "trainer.policy.fsdp_config.reshard_after_forward",
    "trainer.policy.fsdp_config.fsdp_size",
    "trainer.policy.sequence_parallel_size",
    "trainer.policy.tensor_parallel_size",
)
_RAY_KEYS = (
    "trainer.placement.ready_timeout_seconds",
    "generator.num_rollout_workers_per_node",
)
_ONE_ENGINE_KEYS = (
    "generator.inference_engine_pipeline_parallel_size",
    "generator.inference_engine_expert_parallel_size",
    "generator.inference_engine_data_parallel_size",
)

VALUES_WITHOUT_EFFECT: tuple[UnsupportedValue, ...] = (
    *(
        UnsupportedValue(key=key, strategies=("fsdp",), remedy=_ONE_DEVICE)
        for key in _SHARDING_KEYS
    ),
    *(_value(key, remedy=_SAME_RANKS) for key in _SAME_RANKS_KEYS),
    *(
        UnsupportedValue(
            key=key, with_ray=True, remedy="every process is this one without Ray's actors"
        )
        for key in _RAY_KEYS
    ),
    *(
        UnsupportedValue(
            key=key,
            with_ray=True,
            remedy="an engine runs on one device; trainer.placement.use_ray=true starts larger ones",
        )
        for key in _ONE_ENGINE_KEYS
    ),
    UnsupportedValue(
        key="generator.num_inference_engines",
        backends=("vllm", "openai"),
        with_ray=True,
        remedy="there is one embedded engine; for several set trainer.placement.use_ray=true, or use "
        f"{_SERVERS}",
    ),
    *(
        _value(f"generator.{name}", backends=("vllm",), remedy=_ONLY_VLLM)
        for name in (
            "inference_engine_tensor_parallel_size",
            "enforce_eager",
            "enable_prefix_caching",
            "enable_chunked_prefill",
        )
    ),
    _value(
        "generator.served_model_name",
        backends=("openai",),
        remedy=f"only servers have a model name; for one use {_SERVERS}",
    ),
    *(
        _value(f"generator.{name}", backends=("vllm", "openai"), remedy=_LEARNER_WEIGHTS)
        for name in (
            "weight_sync_dir",
            "weight_sync_backend",
            "delta_weight_sync.sync_dir",
            "delta_weight_sync.max_file_size_in_gb",
        )
    ),
    UnsupportedValue(
        key="trainer.placement.colocate_all",
        backends=("vllm", "openai"),
        with_ray=True,
        remedy=_LEARNER_WEIGHTS,
    ),
    UnsupportedValue(
        key="generator.weight_transfer_threshold_cuda_ipc_GB",
        with_ray=True,
        remedy="vLLM on the learner's GPU reads all weights in place, and no other engine is here",
    ),
    # On no section: accepted because the scripts of SkyRL and Fleet set them.
    _value("generator.async_engine", True, remedy="requests always join a running batch"),
    _value(
        "generator.inference_engine.distributed_executor_backend",
        "mp",
        "ray",
        remedy="vLLM chooses how it starts its workers; set it in generator.engine_init_kwargs",
    ),
    _value("generator.language_model_only", False, remedy=_NO_VISION),
    _value("trainer.policy.language_model_only", False, remedy=_NO_VISION),
    _value("trainer.ref.language_model_only", False, remedy=_NO_VISION),
    _value("generator.reasoning_parser", None, remedy="the renderer parses thinking"),
    _value("trainer.flash_attn", True, remedy="the device decides which attention kernel runs"),
    _value("trainer.remove_microbatch_padding", True, remedy="sequences are always packed"),
    _value(
        "trainer.micro_forward_batch_size_per_gpu",
        1,
        remedy="there is no forward pass apart from training; see trainer.max_tokens_per_microbatch",
    ),
    _value("trainer.log_path", None, remedy="trainer.run_path holds everything a run writes"),
    _value(
        "environment.skyrl_gym.fleet_task.tasks_file",
        None,
        remedy="task rows carry their verifiers; `skyfleet tasks prepare` writes such rows",
    ),
)
"""A run with another value gives the same results, so it starts with a warning."""


_ENGINE_SERVERS = "it steers engines across a cluster; drop it: weights are pushed by the trainer"
_DELTAS = "it tunes copies of the weights on disk; drop it: engines keep theirs in memory"
_SERVE = "`skyfleet serve` serves a policy over HTTP; drop it"
_NAMED_SERVERS = "set generator.remote_inference_engine_urls instead"
_VLLM_TUNING = (
    "it tunes vLLM; drop it, or with generator.backend=vllm put it in generator.engine_init_kwargs"
)
_MEGATRON = "it belongs to Megatron; drop it: trainer.strategy=fsdp trains on several devices, and \
trainer.strategy=single on one"
_CRITIC = "the critic is built like the policy and shares its device; drop it"
_SAME_SHARDS = "the model is divided as trainer.policy.fsdp_config says; drop it"
_PRECISION = "float32 masters and float32 reductions; drop it, or set trainer.bf16"
_ONE_LAYER = "every layer is gathered by itself; drop it"
_MEMORY = "it trades memory on large GPUs; drop it, or bound trainer.max_tokens_per_microbatch"
_GYM_SETTINGS = "set environment.skyrl_gym.env_config, which the environment's constructor receives"

UNSUPPORTED_KEYS: dict[str, str] = {
    "data.dataloader": "it starts loader processes; drop it: tasks are read once, in this process",
    "trainer.critic.model.lora": _CRITIC,
    "trainer.critic.model_config_kwargs": _CRITIC,
    "trainer.algorithm.value_head_prefix": "it names a part of the critic in SkyRL's code; drop it",
    "trainer.*.megatron_config": _MEGATRON,
    "trainer.mtp": "it trains draft heads under Megatron; drop it",
    "trainer.vocab_entropy_chunk_*": _MEGATRON,
    "trainer.fused_lm_head_logprob*": _MEGATRON,
    "trainer.*.fsdp_config.mixed_precision": _PRECISION,
    "trainer.*.fsdp_config.wrap_policy": _ONE_LAYER,
    "trainer.critic.fsdp_config": _SAME_SHARDS,
    "trainer.ref.fsdp_config.fsdp_size": _SAME_SHARDS,
    "trainer.ref.fsdp_config.reshard_after_forward": _SAME_SHARDS,
    "trainer.ref.sequence_parallel_size": _SAME_SHARDS,
    "trainer.critic.sequence_parallel_size": _SAME_SHARDS,
    "trainer.sequence_parallel_backend": "only Ulysses runs; drop it",
    "trainer.*.model.fake_int4_qat": "it imitates INT4 experts under Megatron; drop it",
    "trainer.policy.model.lora.lora_sync_path": _ENGINE_SERVERS,
    "trainer.policy.model.lora.max_*loras": _VLLM_TUNING,
    "trainer.ref.model.lora": "the reference model is not trained; drop it",
    "trainer.ref.model_config_kwargs": (
        "the reference model is built like the policy; set trainer.policy.model_config_kwargs"
    ),
    "trainer.policy.torch_profiler_config": "it drives torch.profiler; drop it and read timing/*",
    "trainer.policy.record_memory": "it dumps CUDA memory snapshots; drop it",
    "trainer.policy.use_torch_compile": "it compiles one operation; drop it",
    "trainer.policy.inference_only_init": "it leaves out the optimiser; drop it",
    "trainer.use_expandable_segments": _MEMORY,
    "trainer.logprobs_chunk_size": _MEMORY,
    "trainer.gradient_checkpointing_use_reentrant": (
        "it selects PyTorch's older checkpointing; drop it"
    ),
    "trainer.fully_async.simulate_*": (
        "it replaces training by a pause to measure rollouts; drop it and use "
        "benchmarks/async_learning.py"
    ),
    "trainer.recompute_old_logprobs_per_minibatch": (
        "old log-probabilities do not depend on how a batch is split; drop it"
    ),
    "trainer.algorithm.use_kl_estimator_k3": "removed; set trainer.algorithm.kl_estimator_type=k3",
    "trainer.algorithm.use_abs_kl": "removed; set trainer.algorithm.kl_estimator_type=abs",
    "trainer.enable_ray_gpu_monitor": "it monitors a Ray cluster; drop it",
    "trainer.tags": "it tags a W&B run; drop it or put it in trainer.run_name",
    "trainer.num_logger_*_samples": "it fills W&B tables; drop it and read the run's episodes",
    "trainer.disable_fast_tokenizer": "it selects a slow tokenizer; drop it",
    "trainer.rope_theta": "removed; set trainer.policy.model_config_kwargs.rope_theta",
    "generator.rope_*": "the engine runs the learner's model; set trainer.rope_scaling",
    "generator.model_name": "removed; set trainer.policy.model.path",
    "generator.external_proxy_url": _NAMED_SERVERS,
    "generator.external_server_urls": _NAMED_SERVERS,
    "generator.enable_http_endpoint": _SERVE,
    "generator.http_endpoint_*": _SERVE,
    "generator.override_existing_update_group": _ENGINE_SERVERS,
    "generator.delta_weight_sync.local_checkpoint_dir": _DELTAS,
    "generator.delta_weight_sync.publish_*": _DELTAS,
    "generator.delta_weight_sync.cloud_download_workers": _DELTAS,
    "generator.delta_weight_sync.checkpoint_load_format": _DELTAS,
    "generator.delta_weight_sync.multi_thread_safetensors_max_workers": _DELTAS,
    "generator.inference_engine.offload_kv_for_weight_sync": _ENGINE_SERVERS,
    "generator.inference_engine.router_init_kwargs": _ENGINE_SERVERS,
    "generator.inference_engine.enable_pd": _ENGINE_SERVERS,
    "generator.inference_engine.num_prefill": _ENGINE_SERVERS,
    "generator.inference_engine.use_expandable_segments": _VLLM_TUNING,
    "generator.inference_engine.speculative_config": _VLLM_TUNING,
    "generator.inference_engine.enable_return_routed_experts": _VLLM_TUNING,
    "generator.vllm_v1_disable_multiproc": _VLLM_TUNING,
    "generator.enable_ray_prometheus_stats": _VLLM_TUNING,
    "generator.fully_sharded_loras": _VLLM_TUNING,
    "generator.use_cache_salt": "it keys vLLM's prefix cache by weight version; drop it",
    "generator.*sampling_params.repetition_penalty": "SkyRL does not forward it; drop it",
    "generator.*sampling_params.additional_kwargs": (
        "it passes vLLM more sampling settings; drop it and use those of generator.sampling_params"
    ),
    "generator.vision_language_generator": "it runs tasks with images; drop it",
    "generator.merge_stepwise_output": (
        "it rejoins step-wise rows; drop it: an episode already is one sequence"
    ),
    "environment.skyrl_gym.text2sql": _GYM_SETTINGS,
    "environment.skyrl_gym.llm_as_a_judge": _GYM_SETTINGS,
    "environment.skyrl_gym.search": _GYM_SETTINGS,
    "environment.skyrl_gym.task_gen": "its environment is not available; drop it",
}
"""Pattern -> remedy; a pattern matches a key and every key below it."""


def find_unsupported_key(key: str) -> str | None:
    """The remedy for one of SkyRL's keys that is not supported; None for any other key."""
    for pattern, remedy in UNSUPPORTED_KEYS.items():
        if fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*"):
            return remedy
    return None


# The keys that version 0.1 wrote to every config.yaml and that are no longer fields.
_KEYS_OF_OLD_RUNS = frozenset(
    {
        "trainer.policy.model.lora.init_method",
        "trainer.eval_batch_size",
        "trainer.micro_forward_batch_size_per_gpu",
        "trainer.max_prompt_length",
    }
)


def is_old_run_config(keys: frozenset[str]) -> bool:
    """Whether the config.yaml of a run of version 0.1 holds these keys.

    There trainer.max_prompt_length=512 was a default that nothing read.
    """
    return keys >= _KEYS_OF_OLD_RUNS
