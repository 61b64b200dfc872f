"""Dialects: SkyRL's other spelling of a key -> ours, which is Fleet's flat one."""

from __future__ import annotations

# Newer SkyRL keeps these under generator.inference_engine; the flat name is the same.
_MOVED = (
    "async_engine",
    "backend",
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

SPELLINGS: dict[str, str] = {
    **{f"generator.inference_engine.{name}": f"generator.{name}" for name in _MOVED},
    **{f"generator.inference_engine.{new}": f"generator.{old}" for new, old in _RENAMED.items()},
    "trainer.use_sample_packing": "trainer.remove_microbatch_padding",
    "trainer.log_example_interval": "trainer.print_example_interval",
    "trainer.target_modules": "trainer.policy.model.lora.target_modules",
    "trainer.exclude_modules": "trainer.policy.model.lora.exclude_modules",
}

VALUE_SPELLINGS: dict[tuple[str, str], str] = {("trainer.strategy", "fsdp2"): "fsdp"}


def canonical_key(path: tuple[str, ...]) -> tuple[str, ...]:
    """The same key as we write it; what lies below a moved mapping moves along."""
    for end in range(len(path), 0, -1):
        if ours := SPELLINGS.get(".".join(path[:end])):
            return (*ours.split("."), *path[end:])
    return path


def our_value(key: str, value: object) -> object:
    return VALUE_SPELLINGS.get((key, value), value) if isinstance(value, str) else value


def other_spellings(key: str) -> list[str]:
    return [other for other, ours in SPELLINGS.items() if ours == key]
