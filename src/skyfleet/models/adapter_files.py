"""Adapter files: LoRA adapters to and from a folder that PEFT reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from skyfleet.errors import ModelError
from skyfleet.models.lora import LoraLinear, adapters, merge

FOLDER = "adapter"
"""Inside the model's own: beside its config.json, transformers would want PEFT to load it."""
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapters(module: nn.Module, folder: Path) -> None:
    """`folder` becomes what `PeftModel.from_pretrained` reads, if there are adapters at all."""
    layers = adapters(module)
    if not layers:
        return
    folder.mkdir()
    tensors = {key: tensor.detach().cpu() for key, tensor in _tensors(layers).items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    first = next(iter(layers.values()))
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": getattr(module, "name_or_path", ""),
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (folder / _CONFIG).write_text(json.dumps(described, indent=1))


def load_adapted(module: nn.Module, folder: Path) -> None:
    """Adapters from a model's folder into `module`, in place, and its weights with them.

    The module holds the weights that the adapters were trained on; the merged weights, which the
    folder holds too, prove it.
    """
    path = folder / FOLDER / _WEIGHTS
    if not path.is_file():
        raise ModelError(
            f"{folder} holds no adapters ({FOLDER}/{_WEIGHTS} is missing); resume with "
            "trainer.policy.model.lora.rank=0, as it was saved"
        )
    saved, own = load_file(path), _tensors(adapters(module))
    misfits = sorted(
        {n for n in own if n not in saved or own[n].shape != saved[n].shape} | saved.keys() - own
    )
    if misfits:
        raise ModelError(
            f"{path} holds other adapters than trainer.policy.model.lora asks for "
            f"(first {misfits[0]}); give the keys they were trained with"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])
    merge(module)
    _check_merged(module, folder)


def _check_merged(module: nn.Module, folder: Path) -> None:
    own = module.state_dict()
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                if name not in own:
                    continue
                # Another device may round a product differently; another model is far off.
                saved = file.get_tensor(name).to(own[name])
                if not torch.allclose(own[name], saved, rtol=1e-2, atol=1e-5):
                    raise ModelError(
                        f"{folder}: {name} is not trainer.policy.model.path plus the saved "
                        "adapters: that model has changed since; bring back the one that was adapted"
                    )


def _tensors(layers: dict[str, LoraLinear]) -> dict[str, nn.Parameter]:
    """By the names PEFT gives them."""
    return {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part)
        for name, layer in layers.items()
        for part in ("lora_A", "lora_B")
    }
