"""Refusals: SkyRL's keys that this project knows and does not take, each with the way out."""

from __future__ import annotations

from fnmatch import fnmatchcase

_ENGINE_SERVERS = "it steers engines across a cluster; drop it: weights are handed over here"
_SERVE = "`skyfleet serve` puts a policy behind an HTTP endpoint; drop it"
_NAMED_SERVERS = "set generator.remote_inference_engine_urls instead"
_VLLM_TUNING = (
    "it tunes vLLM; drop it, or with generator.backend=vllm put it in generator.engine_init_kwargs"
)
_MEGATRON = "it belongs to Megatron; drop it: trainer.strategy=single trains on one device"
_CRITIC = "the critic is on the policy's device, built as its model is; drop it"
_SHARDS = "it shards a model over GPUs; drop it: one device holds the model"
_OLD_TIS = "removed; set trainer.algorithm.off_policy_correction.tis_ratio_type=token"
_MEMORY = "it trades memory on large GPUs; drop it, or bound trainer.max_tokens_per_microbatch"
_OTHER_GYM = "it belongs to an environment that is not here; drop it and set environment.env_class"

REFUSED: dict[str, str] = {
    "data.dataloader": "it runs loader processes; drop it: tasks are read once, in this process",
    "trainer.critic.model.lora": _CRITIC,
    "trainer.critic.model_config_kwargs": _CRITIC,
    "trainer.placement.critic_*": _CRITIC,
    "trainer.algorithm.value_head_prefix": "it names a part of the critic in SkyRL's code; drop it",
    "trainer.*.megatron_config": _MEGATRON,
    "trainer.mtp": "it trains draft heads under Megatron; drop it",
    "trainer.vocab_entropy_chunk_*": _MEGATRON,
    "trainer.fused_lm_head_logprob*": _MEGATRON,
    "trainer.policy.fsdp_config.cpu_offload": (
        "the policy's weights stay; set trainer.policy.optimizer_config.offload_after_step=true"
    ),
    "trainer.policy.fsdp_config": _SHARDS,
    "trainer.critic.fsdp_config": _SHARDS,
    "trainer.ref.fsdp_config.fsdp_size": _SHARDS,
    "trainer.ref.fsdp_config.mixed_precision": _SHARDS,
    "trainer.ref.fsdp_config.reshard_after_forward": _SHARDS,
    "trainer.ref.fsdp_config.wrap_policy": _SHARDS,
    "trainer.*.sequence_parallel_size": "it splits a sequence over GPUs; drop it",
    "trainer.sequence_parallel_backend": "it splits a sequence over GPUs; drop it",
    "trainer.*.model.fake_int4_qat": "it imitates INT4 experts under Megatron; drop it",
    "trainer.policy.model.lora.lora_sync_path": _ENGINE_SERVERS,
    "trainer.policy.model.lora.max_*loras": _VLLM_TUNING,
    "trainer.ref.model.lora": "the reference model is never trained; drop it",
    "trainer.ref.model_config_kwargs": (
        "the reference model is built like the policy; set trainer.policy.model_config_kwargs"
    ),
    "trainer.policy.torch_profiler_config": "it drives torch.profiler; drop it and read timing/*",
    "trainer.policy.record_memory": "it dumps CUDA memory snapshots; drop it",
    "trainer.policy.use_torch_compile": "it compiles one operation; drop it",
    "trainer.policy.inference_only_init": "it leaves out the optimiser; drop it",
    "trainer.use_expandable_segments": _MEMORY,
    "trainer.logprobs_chunk_size": _MEMORY,
    "trainer.gradient_checkpointing_use_reentrant": "it picks PyTorch's older checkpointing; drop it",
    "trainer.fully_async": (
        "it trains on stale episodes while new ones are played; drop it: steps take turns here"
    ),
    "trainer.recompute_old_logprobs_per_minibatch": (
        "old logprobs do not depend on how a batch is cut here; drop it"
    ),
    "trainer.algorithm.use_tis": _OLD_TIS,
    "trainer.algorithm.tis_imp_ratio_cap": _OLD_TIS,
    "trainer.algorithm.use_kl_estimator_k3": "removed; set trainer.algorithm.kl_estimator_type=k3",
    "trainer.algorithm.use_abs_kl": "removed; set trainer.algorithm.kl_estimator_type=abs",
    "trainer.log_path": "it placed Ray's logs; set trainer.run_path, which holds everything",
    "trainer.enable_ray_gpu_monitor": "it watches a Ray cluster; drop it",
    "trainer.tags": "it tags a W&B run; drop it or say it in trainer.run_name",
    "trainer.num_logger_*_samples": "it fills W&B tables; drop it and read the run's episodes",
    "trainer.disable_fast_tokenizer": "it picks a slow tokenizer; drop it",
    "trainer.rope_theta": "removed; set trainer.policy.model_config_kwargs.rope_theta",
    "generator.rope_*": "the engine runs the learner's model; set trainer.rope_scaling",
    "generator.model_name": "removed; set trainer.policy.model.path",
    "generator.external_proxy_url": _NAMED_SERVERS,
    "generator.external_server_urls": _NAMED_SERVERS,
    "generator.enable_http_endpoint": _SERVE,
    "generator.http_endpoint_*": _SERVE,
    "generator.override_existing_update_group": _ENGINE_SERVERS,
    "generator.weight_transfer_threshold_cuda_ipc_GB": _ENGINE_SERVERS,
    "generator.inference_engine.delta_weight_sync": _ENGINE_SERVERS,
    "generator.inference_engine.offload_kv_for_weight_sync": _ENGINE_SERVERS,
    "generator.inference_engine.distributed_executor_backend": _ENGINE_SERVERS,
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
    "generator.*sampling_params.repetition_penalty": "SkyRL never forwarded it; drop it",
    "generator.*sampling_params.additional_kwargs": (
        "it passes vLLM more sampling settings; drop it and use those of generator.sampling_params"
    ),
    "generator.vision_language_generator": "it plays tasks with pictures; drop it",
    "generator.merge_stepwise_output": (
        "it rejoins step-wise rows; drop it: an episode already is one sequence"
    ),
    "environment.skyrl_gym.text2sql": _OTHER_GYM,
    "environment.skyrl_gym.llm_as_a_judge": _OTHER_GYM,
    "environment.skyrl_gym.search": _OTHER_GYM,
    "environment.skyrl_gym.task_gen": _OTHER_GYM,
}
"""A pattern stands for the key and everything below it."""


def refusal(key: str) -> str | None:
    """Why a key nobody takes is not taken, if it is one of SkyRL's."""
    for pattern, reason in REFUSED.items():
        if fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*"):
            return reason
    return None
