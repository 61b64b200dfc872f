"""RoPE scaling: extend the context by YaRN, in the model's configuration before it is built.

Engine, learner and reference are built from that configuration, and a saved policy contains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from skyfleet.errors import ModelError

YARN = "yarn"


def change_rope(config: Any, changes: Mapping[str, Any]) -> None:
    """Apply `changes` to the RoPE parameters of a Hugging Face `config`, and extend its context
    length."""
    own = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in own:
        raise ModelError(
            f"{config.model_type} has no RoPE parameters common to all layers, so "
            "trainer.rope_scaling does not apply; remove it"
        )
    rope = {**own, **changes}
    before, kind = own["rope_type"], rope["rope_type"]
    if kind not in (before, YARN) or before not in ("default", kind):
        raise ModelError(
            f"rope_type={kind!r} is not supported for a model with rope_type={before!r}; only yarn is, "
            "and only on a model without RoPE scaling of its own; remove trainer.rope_scaling"
        )
    if kind == YARN:
        config.max_position_embeddings = _extended_context(config, rope)
    config.rope_parameters = rope


def has_rope_scaling(
    folder: Path, changes: Mapping[str, Any], *, trust_remote_code: bool = False
) -> bool:
    """Whether the model saved in `folder` already has this RoPE scaling."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    own = getattr(config, "rope_parameters", None) or {}
    return all(own.get(key) == value for key, value in changes.get("rope_parameters", {}).items())


def _extended_context(config: Any, rope: Mapping[str, Any]) -> int:
    """Tokens of the extended context."""
    factor = rope.get("factor", 0)
    original = rope.get("original_max_position_embeddings", 0)
    if not factor > 1 or not original > 0:
        raise ModelError(
            f"factor={factor!r} with original_max_position_embeddings={original!r} does not extend the "
            "context; set trainer.rope_scaling.factor above 1, and the context the model was trained with"
        )
    if original > config.max_position_embeddings:
        raise ModelError(
            f"trainer.rope_scaling.original_max_position_embeddings={original} exceeds the model's "
            f"{config.max_position_embeddings} positions; set it to the context it was trained with"
        )
    extended = int(factor * original)
    if extended < config.max_position_embeddings:
        raise ModelError(
            f"trainer.rope_scaling gives {factor} x {original} = {extended} tokens, fewer than the "
            f"model's {config.max_position_embeddings} positions; raise factor or remove it"
        )
    return extended
