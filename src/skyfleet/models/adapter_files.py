"""Adapter files: LoRA adapters to and from a folder that PEFT reads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from skyfleet.errors import ModelError
from skyfleet.models.lora import LoraLinear, adapters, merge, merged_state

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
    _check_settings(module, folder / FOLDER / _CONFIG)
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


def refuse_adapted(folder: Path) -> None:
    """ModelError for a folder whose optimiser knows adapters only."""
    if (folder / FOLDER).exists():
        raise ModelError(
            f"{folder} was trained with adapters and trainer.policy.model.lora.rank=0 trains every "
            "weight; give the rank they have, or begin a run of its own with that folder as "
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
                f"trainer.policy.model.lora.{key}={here} and the adapters in {path.parent} have "
                f"{there}; give the {key} they were trained with"
            )


def _check_merged(module: nn.Module, folder: Path) -> None:
    # By transformers, which wrote them: experts, for one, lie in a file otherwise than in memory.
    kind: Any = type(module)
    saved = kind.from_pretrained(folder, config=copy.deepcopy(module.config), dtype="auto")
    weights = saved.state_dict()
    adapted = {f"{name}.weight": layer.base for name, layer in adapters(module).items()}
    for name, own in merged_state(module).items():
        pair = _as_coarse(own.cpu(), weights[name])
        base = adapted.get(name)
        if not (torch.equal(*pair) if base is None else _nearly_equal(*pair, base.cpu())):
            raise ModelError(
                f"{folder}: {name} is not trainer.policy.model.path plus the saved "
                "adapters: that model has changed since; bring back the one that was adapted"
            )


def _as_coarse(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the coarser type: a run may go on in another than it was saved in."""
    dtype = max(one.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return one.to(dtype), other.to(dtype)


def _nearly_equal(one: Tensor, other: Tensor, base: Tensor) -> bool:
    """As far as another device may sum a product in another order, and round it to a neighbour.

    In another precision a weight is also rounded at another of the base's thresholds.
    """
    in_float32 = 16 * torch.finfo(torch.float32).eps * float(other.abs().max())
    steps = torch.finfo(other.dtype).eps * (other.abs().float() + base.abs().float())
    return bool(((one.float() - other.float()).abs() <= steps + in_float32).all())


def _tensors(layers: dict[str, LoraLinear]) -> dict[str, nn.Parameter]:
    """By the names PEFT gives them."""
    return {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part)
        for name, layer in layers.items()
        for part in ("lora_A", "lora_B")
    }
