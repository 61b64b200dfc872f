"""Shapes of the models of the presets, so that a run can be planned where no model hub is reachable.

The values are those of each model's config.json, as public code quotes them: NVIDIA/Megatron-LM
(examples/post_training/modelopt/conf/qwen) and radixark/miles (scripts/models). A test builds each model on the meta device and compares its parameters with the published
number.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from skyfleet.config.policy import Lora
from skyfleet.models.shape import ModelShape, shape_of_module

_QWEN3: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-8B": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-32B": {
        **_QWEN3, "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-30B-A3B": {
        **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip


def known_models() -> list[str]:
    return list(_CONFIGS)


def build_known_model(path: str) -> nn.Module:
    """The model without its weights, on the meta device."""
    values = _CONFIGS[path]
    kind = Qwen3MoeConfig if "num_experts" in values else Qwen3Config
    with torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(kind(**values))
    return module


@cache
def _cached(path: str, lora: str) -> ModelShape:
    return shape_of_module(build_known_model(path), path, lora=Lora.model_validate_json(lora))


def read_known_shape(path: str, *, lora: Lora | None = None) -> ModelShape | None:
    """The shape of a model of the presets; None for others."""
    if path not in _CONFIGS:
        return None
    return _cached(path, (lora or Lora()).model_dump_json())
