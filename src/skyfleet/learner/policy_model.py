"""PolicyModel: the policy's weights, tokenizer, decoder and chat renderer in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyfleet.chat.renderer import Renderer
from skyfleet.config.root import RunConfig
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyModel:
    """The weights, and the tokenizer and renderer that belong to them."""

    loaded: LoadedModel
    decoder: Decoder
    renderer: Renderer


def rope_overrides(config: RunConfig) -> dict[str, Any]:
    """The model-config overrides of `trainer.rope_scaling`, for every model that reads episodes."""
    scaling = config.trainer.rope_scaling
    return {"rope_parameters": scaling.model_dump()} if scaling else {}
