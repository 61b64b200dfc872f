"""Save and load LoRA adapters in PEFT's file format."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from skyfleet.errors import ModelError
from skyfleet.models.lora import LoraLinear, adapters, merge, merged_state_dict

FOLDER = "adapter"
"""Inside the model's folder.

Beside config.json, transformers would require PEFT to load the model.
"""
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapters(module: nn.Module, folder: Path) -> None:
    """Write `folder` for `PeftModel.from_pretrained`; nothing if the module has no adapters."""
    layers = adapters(module)
    tensors = {key: tensor.detach().cpu() for key, tensor in list_adapters(layers).items()}
    write_adapters(module, tensors, folder)


def write_adapters(module: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """As `save_adapters`, of whole tensors by PEFT's names, where `module` has parts of them."""
    layers = adapters(module)
    if not layers:
        return
    folder.mkdir()
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


def load_adapters(module: nn.Module, folder: Path) -> None:
    """Load the adapters of a model folder into `module`, in place, and merge them.

    `module` must hold the base weights that the adapters were trained on. The merged weights in the
    same folder are compared to verify that.
    """
    saved = read_adapters(module, folder)
    own = list_adapters(adapters(module))
    mismatched = sorted(
        {n for n in own if n not in saved or own[n].shape != saved[n].shape} | saved.keys() - own
    )
    if mismatched:
        raise ModelError(
            f"the adapters in {folder / FOLDER / _WEIGHTS} do not match trainer.policy.model.lora "
            f"(first mismatch: {mismatched[0]}); use the settings they were trained with"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])
    merge(module)
    _check_merged(module, folder)


def read_adapters(module: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The whole adapters in a model folder by PEFT's names; `module` may have parts of them."""
    path = folder / FOLDER / _WEIGHTS
    if not path.is_file():
        raise ModelError(
            f"{folder} has no LoRA adapters ({FOLDER}/{_WEIGHTS} is missing), but "
            "trainer.policy.model.lora.rank is not 0; resume with rank=0, as it was saved"
        )
    _check_settings(module, folder / FOLDER / _CONFIG)
    return load_file(path)


def reject_adapter_checkpoint(folder: Path) -> None:
    """ModelError for a folder that was trained with LoRA: its optimizer state covers adapters
    only."""
    if (folder / FOLDER).exists():
        raise ModelError(
            f"{folder} was trained with LoRA adapters, but trainer.policy.model.lora.rank=0 trains "
            "every weight; set the rank of the adapters, or start a new run with that folder as "
            "trainer.policy.model.path"
        )


def _check_settings(module: nn.Module, path: Path) -> None:
    saved = json.loads(path.read_text())
    layer = next(iter(adapters(module).values()))
    for key, there, here in (
        ("rank", saved["r"], layer.rank),
        ("alpha", saved["lora_alpha"], layer.alpha),
    ):
        if there != here:
            raise ModelError(
                f"trainer.policy.model.lora.{key}={here}, but the adapters in {path.parent} have "
                f"{key}={there}; use the {key} they were trained with"
            )


def _check_merged(module: nn.Module, folder: Path) -> None:
    # Load with transformers, which wrote the file: its layout of experts differs from the module's.
    kind: Any = type(module)
    saved = kind.from_pretrained(
        folder, config=copy.deepcopy(module.config), dtype="auto", trust_remote_code=False
    )
    weights = saved.state_dict()
    adapted = {f"{name}.weight": layer.base for name, layer in adapters(module).items()}
    for name, own in merged_state_dict(module).items():
        pair = _to_lower_precision(own.cpu(), weights[name])
        base = adapted.get(name)
        if not (torch.equal(*pair) if base is None else _nearly_equal(*pair, base.cpu())):
            raise ModelError(
                f"{folder}: {name} differs from trainer.policy.model.path plus the saved adapters, so "
                "that base model has changed; restore the base model that was adapted"
            )


def _to_lower_precision(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the lower precision, because a run may resume in another dtype."""
    dtype = max(one.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return one.to(dtype), other.to(dtype)


def _nearly_equal(one: Tensor, other: Tensor, base: Tensor) -> bool:
    """Equal up to one rounding step, because another device may sum a product in another order.

    In another precision, a weight also has another rounding offset.
    """
    in_float32 = 16 * torch.finfo(torch.float32).eps * float(other.abs().max())
    steps = torch.finfo(other.dtype).eps * (other.abs().float() + base.abs().float())
    return bool(((one.float() - other.float()).abs() <= steps + in_float32).all())


def list_adapters(layers: dict[str, LoraLinear]) -> dict[str, nn.Parameter]:
    """Adapter parameters by PEFT's names."""
    return {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part)
        for name, layer in layers.items()
        for part in ("lora_A", "lora_B")
    }
