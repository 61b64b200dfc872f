"""WeightDoor: what vLLM's worker processes learn from us: to take new weights, and to tell them.

vLLM mixes it into its own worker class, so its methods carry our name. Only the process that started
vLLM can send bytes, which are unpickled here; over HTTP there are none.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from skyfleet.models.bit_sums import bit_sums

_DEVICE_ARGUMENT = 6
"""Where torch writes the sender's number of a device, which may not be the receiver's."""


class WeightDoor:
    device: torch.device
    model_runner: Any
    vllm_config: Any
    _skyfleet_path = ""

    def skyfleet_device(self) -> str:
        return device_name(self.device)

    def skyfleet_about(self) -> dict[str, Any]:
        """What a trainer that has not started this vLLM must know of it."""
        model = self.vllm_config.model_config
        return {
            "model_dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": str(model.logprobs_mode),
            "sleep_mode": bool(model.enable_sleep_mode),
        }

    def skyfleet_load_file(self, path: str) -> None:
        """From a safetensors file in a folder that both processes see."""
        if not os.access(path, os.R_OK):
            raise FileNotFoundError(
                f"{path} cannot be read there; set generator.weight_sync_dir to a folder that "
                "trainer and server both see"
            )
        with safe_open(path, framework="pt") as file:
            _replace(self, ((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118
        self._skyfleet_path = path

    def skyfleet_given(self) -> str:
        """The file that its weights came from; empty since it was started."""
        return self._skyfleet_path

    def skyfleet_load_handles(self, pickled: bytes) -> None:
        """From the sender's own memory on this GPU, without a copy in between."""
        handles: list[tuple[str, list[Any]]] = pickle.loads(pickled)
        for _, arguments in handles:
            arguments[_DEVICE_ARGUMENT] = self.device.index
        _replace(self, ((name, _rebuilt(arguments)) for name, arguments in handles))
        torch.cuda.synchronize(self.device)

    def skyfleet_sums(self, shapes: dict[str, list[int]]) -> dict[str, list[int]]:
        """`bit_sums` of the weights with these names and shapes, as they are held here.

        Left out are those in another form: split over GPUs, or packed for a CPU's instructions.
        """
        held = {name: _held(self.model_runner.get_model(), name, shapes) for name in shapes}
        return {
            name: bit_sums(weight).tolist()
            for name, weight in held.items()
            if weight is not None and list(weight.shape) == list(shapes[name])
        }


def device_name(device: torch.device) -> str:
    """The same in every process, whatever numbers it gives its GPUs."""
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)


def _rebuilt(arguments: Sequence[Any]) -> Tensor:
    rebuilt: Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return rebuilt


def _replace(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        worker.reload_weights(weights_iterator=weights)
        head = getattr(worker.model_runner.get_model(), "lm_head", None)
        if worker.device.type == "cpu" and head is not None:
            # A CPU computes with packed copies, and a tied head's is not packed anew: vLLM loads
            # its weight under the embedding's name.
            head.quant_method.process_weights_after_loading(head)


def _held(model: Any, name: str, shapes: Mapping[str, Sequence[int]]) -> Tensor | None:
    """The rows of vLLM's tensor that hold `name`: it fuses some and pads the vocabulary."""
    rows = shapes[name][0]
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    if name in parameters:
        return parameters[name][:rows]
    module, _, leaf = name.rpartition(".")
    parent, _, own = module.rpartition(".")
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        whole = parameters.get(f"{parent}.{fused}.{leaf}")
        if own in parts and whole is not None:
            before = parts[: parts.index(own)]
            start = sum(shapes[f"{parent}.{part}.{leaf}"][0] for part in before)
            return whole[start : start + rows]
    return None
