"""Freed tensors that the heap keeps are returned to the system."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyfleet.models import heap


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(heap._glibc() is None, reason="needs glibc 2.33")
def test_unused_heap_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.ones(2**14) for _ in range(2000)]
    # What lives on above them keeps glibc from returning them by itself.
    kept = tensors[::20]
    del tensors
    freed = heap.count_free_heap()
    assert freed > 100 * 2**20
    before = resident_bytes()
    monkeypatch.setattr(heap, "MIN_BYTES", 2**60)
    heap.return_free_heap()
    assert resident_bytes() > before - 2**20  # too little to be worth it
    monkeypatch.setattr(heap, "MIN_BYTES", 2**20)
    heap.return_free_heap()
    assert resident_bytes() < before - freed // 2
    assert all(bool((tensor == 1).all()) for tensor in kept)
