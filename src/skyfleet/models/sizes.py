"""Sizes: what two configurations of a model must agree in before one's weights are the other's."""

from __future__ import annotations

from typing import Any

_SIZES = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)


def sizes_of(config: Any) -> dict[str, Any]:
    """By Hugging Face's names, as far as a configuration has them."""
    named = {name: getattr(config, name, None) for name in _SIZES}
    return {name: value for name, value in named.items() if value is not None}
