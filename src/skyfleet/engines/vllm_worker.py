"""WeightUpdateExtension: methods that vLLM's workers gain to load weights and to report checksums.

vLLM loads the class by its dotted name (`WORKER_EXTENSION` in vllm_controller.py) and mixes it into
its own worker class, so all names start with `skyfleet_`. Only the process that started vLLM can
send bytes, which are unpickled here; the HTTP route accepts JSON only.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from skyfleet.models.weights import read_model_sizes, weight_checksum
from skyfleet.weight_transfer.delta_receiver import DeltaReceiver
from skyfleet.weight_transfer.receiver import WeightReceiver

_DEVICE_ARGUMENT = 6
"""Index of the sender's device number, which may differ in the receiving process."""


class WeightUpdateExtension:
    device: torch.device
    model_runner: Any
    vllm_config: Any
    _skyfleet_given: Mapping[str, list[int]] = MappingProxyType({})
    _skyfleet_deltas: DeltaReceiver | None = None
    _skyfleet_receiver: WeightReceiver | None = None

    def skyfleet_device(self) -> str:
        return device_name(self.device)

    def skyfleet_about(self) -> dict[str, Any]:
        """Settings that a trainer must know of a server; `VllmServerInfo` parses the result."""
        model = self.vllm_config.model_config
        return {
            "model_dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": str(model.logprobs_mode),
            "sleep_mode": bool(model.enable_sleep_mode),
            "quantization": model.quantization and str(model.quantization),
            "n_workers": self.vllm_config.parallel_config.world_size,
            "sizes": read_model_sizes(model.hf_text_config),
        }

    def skyfleet_load_file(self, path: str) -> None:
        """Load weights from a safetensors file in a folder that both processes see."""
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError as error:
            raise FileNotFoundError(
                f"{path} is not readable by user {os.getuid()} of the vLLM server ({error.strerror}); "
                "set generator.weight_sync_dir to a folder that trainer and server both see"
            ) from error
        with safe_open(path, framework="pt") as file:
            self._skyfleet_load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def skyfleet_load_handles(self, pickled: bytes) -> None:
        """Load weights from the sender's memory on this GPU (CUDA IPC), without a copy in
        between."""
        handles: list[tuple[str, list[Any]]] = pickle.loads(pickled)
        for _, arguments in handles:
            arguments[_DEVICE_ARGUMENT] = self.device.index
        self._skyfleet_load((name, _open_handle(arguments)) for name, arguments in handles)
        torch.cuda.synchronize(self.device)

    def skyfleet_fetch_delta(self, sync_dir: str, version: int) -> None:
        """Fetch a version of the weights from a folder or bucket; the engine may go on meanwhile."""
        receiver = self._skyfleet_deltas
        if receiver is None or receiver.sync_dir != sync_dir:
            self._skyfleet_deltas = receiver = DeltaReceiver(sync_dir)
        receiver.fetch(version)

    def skyfleet_load_delta(self, _: str) -> None:
        """Load the weights that were fetched."""
        assert self._skyfleet_deltas is not None, "no weights were fetched"
        self._skyfleet_load(self._skyfleet_deltas.named_weights(with_aliases=False))

    def skyfleet_join_group(self, settings: dict[str, Any]) -> None:
        """Join a transfer group as the rank that follows `first_rank` by this worker's own."""
        options = dict(settings)
        rank = options.pop("first_rank") + getattr(self, "rank", 0)
        self._skyfleet_receiver = WeightReceiver(rank=rank, device=self.device, **options)

    def skyfleet_receive(self, _: str) -> None:
        """Load the weights that the sender of the group sends now."""
        assert self._skyfleet_receiver is not None, "the worker is in no transfer group"
        self._skyfleet_load(self._skyfleet_receiver.stream())

    def skyfleet_sums(self, shapes: dict[str, list[int]]) -> dict[str, dict[str, list[int]]]:
        """Checksums of the weights as vLLM received them last ("given"), and as it holds them
        ("held").

        "held" covers weights with these names and shapes: those that vLLM packs for a CPU, or
        quantizes, cannot be read back.
        """
        parameters = dict(self.model_runner.get_model().named_parameters())
        fused = getattr(self.model_runner.get_model(), "packed_modules_mapping", {})
        held = {name: _find_held(parameters, fused, name, shapes) for name in shapes}
        return {
            "given": dict(self._skyfleet_given),
            "held": {
                name: weight_checksum(weight).tolist()
                for name, weight in held.items()
                if weight is not None
                and list(weight.shape) == list(shapes[name])
                and weight.dtype in _COMPARABLE
            },
        }

    def _skyfleet_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._skyfleet_given = given = dict[str, list[int]]()

        def with_checksums() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                given[name] = weight_checksum(weight).tolist()
                yield name, weight

        _replace(self, with_checksums())


_COMPARABLE = (torch.bfloat16, torch.float16, torch.float32)


def device_name(device: torch.device) -> str:
    """The UUID of a GPU: the same in every process, whatever its device numbers are."""
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)


def _open_handle(arguments: Sequence[Any]) -> Tensor:
    rebuilt: Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return rebuilt


def _replace(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        worker.reload_weights(weights_iterator=weights)
        head = getattr(worker.model_runner.get_model(), "lm_head", None)
        if worker.device.type == "cpu" and head is not None:
            # On a CPU vLLM computes with packed copies. It loads a tied head under the embedding's name,
            # so the head is not packed again by itself.
            head.quant_method.process_weights_after_loading(head)


def _find_held(
    parameters: Mapping[str, Tensor],
    fused: Mapping[str, Sequence[str]],
    name: str,
    shapes: Mapping[str, Sequence[int]],
) -> Tensor | None:
    """The rows of vLLM's tensor that hold `name`: vLLM fuses some weights and pads the
    vocabulary."""
    if name in parameters:
        return parameters[name][: shapes[name][0]]
    module, _, leaf = name.rpartition(".")
    parent, _, own = module.rpartition(".")
    for whole, parts in fused.items():
        weight = parameters.get(f"{parent}.{whole}.{leaf}")
        if own in parts and weight is not None:
            rows = [shapes.get(f"{parent}.{part}.{leaf}", [0])[0] for part in parts]
            # With additional rows, the offsets below would be wrong.
            if sum(rows) == len(weight):
                start = sum(rows[: parts.index(own)])
                return weight[start : start + shapes[name][0]]
    return None
