"""Rope: longer contexts by YaRN, written into a model's configuration before it is built.

Engine, learner and reference are built from that configuration, and a saved policy carries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from skyfleet.errors import ModelError

YARN = "yarn"


def change_rope(config: Any, changes: Mapping[str, Any]) -> None:
    """`changes` go into the rotary parameters of a Hugging Face `config`; the context grows along."""
    own = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in own:
        raise ModelError(
            f"{config.model_type} has no rotary positions that all layers share, so "
            "trainer.rope_scaling cannot stretch them; leave it out"
        )
    rope = {**own, **changes}
    before, kind = own["rope_type"], rope["rope_type"]
    if kind not in (before, YARN) or before not in ("default", kind):
        raise ModelError(
            f"rope_type={kind!r} for a model whose own is {before!r}; only yarn runs, on a model "
            "that is not stretched otherwise; leave trainer.rope_scaling out"
        )
    if kind == YARN:
        config.max_position_embeddings = _reach(config, rope)
    config.rope_parameters = rope


def carries_rope(folder: Path, changes: Mapping[str, Any]) -> bool:
    """Whether the model saved in `folder` is stretched so already."""
    own = getattr(AutoConfig.from_pretrained(folder), "rope_parameters", None) or {}
    return all(own.get(key) == value for key, value in changes.get("rope_parameters", {}).items())


def _reach(config: Any, rope: Mapping[str, Any]) -> int:
    """Tokens of the stretched context."""
    factor = rope.get("factor", 0)
    original = rope.get("original_max_position_embeddings", 0)
    if not factor > 1 or not original > 0:
        raise ModelError(
            f"factor={factor!r} and original_max_position_embeddings={original!r} stretch nothing; "
            "set trainer.rope_scaling.factor above 1 and the context the model was trained with"
        )
    if original > config.max_position_embeddings:
        raise ModelError(
            f"trainer.rope_scaling.original_max_position_embeddings={original} and the model knows "
            f"{config.max_position_embeddings} positions; set it to the context it was trained with"
        )
    reach = int(factor * original)
    if reach < config.max_position_embeddings:
        raise ModelError(
            f"trainer.rope_scaling reaches {factor} x {original} = {reach} tokens and the model "
            f"knows {config.max_position_embeddings} already; raise factor or leave it out"
        )
    return reach
