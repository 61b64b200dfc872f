"""VllmSettings: what a vLLM engine is started with, and which vLLM can be."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from skyfleet.engines.versions import at_least
from skyfleet.errors import ConfigError, MissingExtraError

FIRST_VLLM = "0.23"
"""The first whose weights can be replaced layer by layer while requests wait."""

WORKER_EXTENSION = "skyfleet.engines.vllm_worker.WeightDoor"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Named as in `generator`; defaults are its own."""

    max_model_len: int
    """Tokens of the longest episode, its last turn included."""
    model_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.8
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    sleep_level: Literal[0, 1, 2] = 0
    """While the learner works: 0 keeps the memory, 1 moves the weights to the host and drops the
    cache, 2 drops the weights too, which a weight sync must bring back. CUDA only."""
    seed: int = 0
    """For requests that have none of their own."""
    engine_init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Handed to vLLM as they are."""


def engine_args(model_path: str, settings: VllmSettings, known: Collection[str]) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs, whose names are `known`."""
    ours: dict[str, Any] = {
        "model": model_path,
        # Tokens in, tokens out: words are the renderer's.
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_sleep_mode": settings.sleep_level > 0,
        "disable_log_stats": True,
        "dtype": settings.model_dtype,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "seed": settings.seed,
    }
    theirs = dict(settings.engine_init_kwargs)
    if taken := sorted(ours.keys() & theirs.keys() - {"disable_log_stats"}):
        raise ConfigError(
            f"generator.engine_init_kwargs has {taken}, which other keys decide; leave them out"
        )
    if unknown := sorted(theirs.keys() - set(known)):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        raise ConfigError(f"generator.engine_init_kwargs.{unknown[0]}: vLLM has none such; {hint}")
    return ours | theirs


def check_vllm() -> None:
    """MissingExtraError without vLLM, ConfigError with one that is too old."""
    try:
        from vllm import __version__ as version
    except ImportError:
        raise MissingExtraError("vllm", "train,vllm", constrained=False) from None
    check_version(version)


def check_version(version: str) -> None:
    if not at_least(version, FIRST_VLLM):
        raise ConfigError(
            f"generator.backend='vllm' and vLLM {version} is installed; it needs {FIRST_VLLM} or "
            "newer, or start that one as a server and use generator.backend='openai'"
        )
