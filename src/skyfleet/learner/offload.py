"""Offload: what a step does not need waits in the CPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import UntypedStorage, nn

CPU = torch.device("cpu")


class Parked:
    """A frozen model whose weights are on the CPU but for the time they are called.

    Its device's memory is given back and taken again under the tensors, which stay the same
    objects: whoever has made a view of a weight still has it.
    """

    def __init__(self, module: nn.Module, *, beside: nn.Module) -> None:
        """What it shares with the module `beside` it stays where it is."""
        shared = _storages(beside)
        own = _storages(module)
        self._storages = [own[at] for at in own if at not in shared and own[at].resizable()]
        self._copies = [_copied(storage) for storage in self._storages]
        self._leave()

    @contextmanager
    def called(self) -> Iterator[None]:
        # Blocking copies: weights that were still on their way have been read as garbage.
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        for storage in self._storages:
            storage.resize_(0)


def _copied(storage: UntypedStorage) -> UntypedStorage:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    copy.copy_(storage)
    return copy


def _storages(module: nn.Module) -> dict[int, UntypedStorage]:
    """By address: tied weights and joined ones are one."""
    tensors = chain(module.parameters(), module.buffers())
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages}
