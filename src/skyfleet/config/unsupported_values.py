"""Gaps: keys whose values load but do not all run yet; support is added by deleting a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    key: str
    works: tuple[object, ...] = ()
    """Values that run; empty stands for the default alone."""
    backends: tuple[str, ...] = ()
    """Under these values of generator.backend every value runs; servers are openai's, also vLLM's."""
    instead: str


# vLLM's own; the embedded engine has nothing to do with them, and a server has been started.
_VLLM_KEYS = (
    "generator.model_dtype",
    "generator.enforce_eager",
    "generator.enable_prefix_caching",
    "generator.enable_chunked_prefill",
    "generator.engine_init_kwargs",
    "generator.inference_engine_tensor_parallel_size",
)

_DEVICE_KEYS = (
    "trainer.placement.colocate_policy_ref",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node",
    "trainer.placement.ref_num_nodes",
    "trainer.placement.ref_num_gpus_per_node",
    "generator.inference_engine_pipeline_parallel_size",
    "generator.inference_engine_expert_parallel_size",
    "generator.inference_engine_data_parallel_size",
)


def _gap(
    key: str,
    *works: object,
    instead: str,
    backends: tuple[str, ...] = (),
) -> Gap:
    return Gap(key=key, works=works, instead=instead, backends=backends)


_TRAINER = (
    _gap("trainer.flash_attn", instead="attention is always fused where it can be; leave it out"),
    _gap("trainer.remove_microbatch_padding", instead="sequences are always packed; leave it out"),
    _gap("trainer.strategy", "single", instead="one device trains; use single"),
    _gap(
        "trainer.policy.model.lora.dropout",
        instead="the engine samples without it, and would sample from another policy; use 0",
    ),
    _gap("trainer.policy.language_model_only", instead="models have no vision tower; leave it out"),
    _gap("trainer.ref.language_model_only", instead="models have no vision tower; leave it out"),
)

_SERVERS = (
    "servers: generator.backend=vllm with run_engines_locally=false, or to play only "
    "generator.backend=openai"
)

_GENERATOR = (
    _gap(
        "generator.num_inference_engines",
        backends=("vllm", "openai"),
        instead=f"the embedded engine is one; use 1, or {_SERVERS}",
    ),
    _gap(
        "generator.run_engines_locally",
        backends=("vllm", "openai"),
        instead=f"the embedded engine runs here; use true, or {_SERVERS}",
    ),
    _gap(
        "generator.served_model_name",
        backends=("openai",),
        instead=f"only servers are asked by name; leave it out, or have {_SERVERS}",
    ),
    _gap("generator.async_engine", instead="requests always join a running batch; use true"),
    _gap(
        "generator.weight_sync_dir",
        backends=("vllm", "openai"),
        instead="the embedded engine has the learner's own weights; leave it out",
    ),
    _gap(
        "trainer.placement.colocate_all",
        backends=("vllm", "openai"),
        instead="the embedded engine has the learner's own weights; leave it out",
    ),
    _gap("generator.weight_sync_backend", instead="learner and engine share a machine; use nccl"),
    _gap("generator.language_model_only", instead="models have no vision tower; leave it out"),
    _gap("generator.reasoning_parser", instead="the renderer reads thoughts; leave it out"),
)

_WORLD = (
    _gap(
        "environment.skyrl_gym.fleet_task.tasks_file",
        instead="rows carry their verifiers; name the file in data.train_data",
    ),
    _gap("environment.skyrl_gym.fleet_task.enable_hints", instead="nobody is told more; use false"),
)

GAPS: tuple[Gap, ...] = (
    *_TRAINER,
    *_GENERATOR,
    *_WORLD,
    *(_gap(key, instead="one process, one device; leave it out") for key in _DEVICE_KEYS),
    *(
        _gap(
            key,
            backends=("vllm",),
            instead="only vLLM started here has it; leave it out, or set generator.backend=vllm "
            "with run_engines_locally=true",
        )
        for key in _VLLM_KEYS
    ),
)
