"""Targets of a transfer: a module that gets whole weights, or only LoRA adapters that it merges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from skyfleet.errors import SentinelError
from skyfleet.models.lora import adapters, merge, merged_state_dict
from skyfleet.models.weights import weight_checksum
from skyfleet.weight_transfer.buckets import Entry


class ModuleWeights:
    """The weights of a module, such as an engine's own copy: each is copied and read back."""

    def __init__(self, module: nn.Module | Mapping[str, Tensor]) -> None:
        """A mapping is the weights by name, which are written in place."""
        # The state dict shares the tensors.
        self._held = merged_state_dict(module) if isinstance(module, nn.Module) else dict(module)
        self._received: set[str] = set()

    @torch.no_grad()
    def load(self, entries: Sequence[Entry], bucket: Tensor) -> None:
        for entry in entries:
            held = self._held.get(entry.name)
            if held is None:
                raise SentinelError(
                    f"weight sync: {entry.name} was sent, and the engine's model has no such weight; "
                    "start the engine from the learner's model"
                )
            if tuple(held.shape) != entry.shape:
                raise SentinelError(
                    f"weight sync: {entry.name} was sent with shape {entry.shape}, and the engine's "
                    f"has {tuple(held.shape)}; start the engine from the learner's model"
                )
            if entry.same_as is None:
                held.copy_(entry.view(bucket))
            elif held.data_ptr() != (source := self._held[entry.same_as]).data_ptr():
                held.copy_(source)
        self._compare(entries, bucket)
        self._received.update(entry.name for entry in entries)

    def finish(self, computed: Mapping[str, Sequence[int]]) -> None:
        covered = {self._held[name].data_ptr() for name in self._received}
        missing = sorted(
            name
            for name, weight in self._held.items()
            if name not in self._received and weight.data_ptr() not in covered
        )
        self._received = set()
        if missing:
            raise SentinelError(
                f"weight sync: {len(missing)} weights were not sent, such as {missing[0]}; start the "
                "engine from the learner's model"
            )
        self._compare_computed(computed)

    def _compare_computed(self, computed: Mapping[str, Sequence[int]]) -> None:
        compare_checksums(self._held, computed)

    def _compare(self, entries: Sequence[Entry], bucket: Tensor) -> None:
        """What the sender packed, what arrived and what is held are the same bits.

        Between equal dtypes the held weight proves both. One wait for the device per bucket.
        """
        rows: list[Tensor] = []
        expected: list[tuple[Entry, Tensor | None]] = []
        for entry in entries:
            held = self._held[entry.name]
            if held.dtype == entry.torch_dtype:
                rows.append(weight_checksum(held))
                expected.append((entry, None))
            elif entry.same_as is None:
                arrived = entry.view(bucket)
                rows += [weight_checksum(arrived), weight_checksum(held)]
                rounded = weight_checksum(arrived.to(held.dtype))
                expected += [(entry, None), (entry, rounded)]
        if not rows:
            return
        found = torch.stack([row.to(bucket.device) for row in rows]).tolist()
        for (entry, own), row in zip(expected, found, strict=True):
            if row != (list(entry.checksum) if own is None else own.tolist()):
                raise SentinelError(f"weight sync: the engine's copy of {entry.name} differs")


class AdapterWeights(ModuleWeights):
    """Only LoRA's A and B are received; the module merges them, and all its weights are compared.

    The module has the learner's base and adapters of the same rank.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__({name: weight.detach() for name, weight in named_adapters(module)})
        self._module = module

    def _compare_computed(self, computed: Mapping[str, Sequence[int]]) -> None:
        merge(self._module)
        compare_checksums(merged_state_dict(self._module), computed)


def named_adapters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """LoRA's A and B by name, in place of `Learner.named_weights()`."""
    for name, layer in adapters(module).items():
        yield f"{name}.lora_A", layer.lora_A
        yield f"{name}.lora_B", layer.lora_B


def sum_weights(module: nn.Module) -> dict[str, list[int]]:
    """Checksums of all merged weights, which receivers of adapters must reach."""
    weights = merged_state_dict(module)
    rows = torch.stack([weight_checksum(weight) for weight in weights.values()]).tolist()
    return dict(zip(weights, rows, strict=True))


def compare_checksums(weights: Mapping[str, Tensor], expected: Mapping[str, Sequence[int]]) -> None:
    """SentinelError names the first weight that differs."""
    if not expected:
        return
    names = [name for name in expected if name in weights]
    if absent := sorted(expected.keys() - weights.keys()):
        raise SentinelError(f"weight sync: the engine has no weight {absent[0]}")
    rows = torch.stack([weight_checksum(weights[name]) for name in names]).tolist()
    wrong = [name for name, row in zip(names, rows, strict=True) if row != list(expected[name])]
    if wrong:
        raise SentinelError(
            f"weight sync: {len(wrong)} of {len(names)} weights of the engine differ, such as "
            f"{wrong[0]}; its base is not the learner's, or it merges in another precision"
        )
