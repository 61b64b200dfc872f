"""Graphs: work of fixed shapes recorded as CUDA graphs, each replayed at the cost of one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Recorder:
    """Its graphs take their memory from one pool: what one gives, the next may overwrite."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(
        self, work: Callable[[], Any], *, before: Callable[[], object] = lambda: None
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        """The graph, and what `work` gave: the same memory after every replay.

        Kernels are compiled by running it twice, each time after `before`.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                before()
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            given = work()
        self._pool = self._pool or graph.pool()
        return graph, given
