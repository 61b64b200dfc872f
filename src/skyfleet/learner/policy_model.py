"""PolicyModel: the policy's weights, tokenizer, decoder and chat renderer in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from skyfleet.chat.renderer import Renderer
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyModel:
    """The weights, and the tokenizer and renderer that belong to them."""

    loaded: LoadedModel
    decoder: Decoder
    renderer: Renderer


def choose_device(name: str) -> torch.device:
    """The device of `trainer.device`; auto is CUDA if there is one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("trainer.device='cuda' and torch sees no CUDA device; set it to cpu")
    return torch.device("cuda" if name != "cpu" and available else "cpu")


def choose_dtype(bf16: bool | Literal["auto"], device: torch.device) -> torch.dtype:
    """The type of weights; auto is bfloat16 on CUDA."""
    low = bf16 is True or (bf16 == "auto" and device.type == "cuda")
    return torch.bfloat16 if low else torch.float32


def rope_overrides(config: RunConfig) -> dict[str, Any]:
    """The model-config overrides of `trainer.rope_scaling`, for every model that reads episodes."""
    scaling = config.trainer.rope_scaling
    return {"rope_parameters": scaling.model_dump()} if scaling else {}
