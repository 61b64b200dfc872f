"""CUDA graphs and the forward pass they record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyfleet.models.decoder import Decoder
from skyfleet.models.fused.functions import kernels, product
from skyfleet.models.fused.layers import FusedLayer, Joined

Mix = Callable[[int, FusedLayer, Tensor], Tensor]
"""A layer's number, the layer, its queries, keys and values as projected [N, X] -> what queries took."""


def run_layers(
    decoder: Decoder, layers: Sequence[FusedLayer], token_ids_N: Tensor, mix: Mix
) -> Tensor:
    """The last layer's output [N, E], normed and ready for `logits`.

    A layer is computed here as in `FusedLayer.__call__`, which the learner runs: mend both.
    """
    of_layers, eps = kernels(token_ids_N.device), decoder.eps
    x_NE, delta_NE = None, decoder.embedding_weight[token_ids_N]
    for index, layer in enumerate(layers):
        x_NE, y_NE, _ = of_layers.add_norm(x_NE, delta_NE, layer.input_norm, eps)
        out_NHD = mix(index, layer, _projected(layer.qkv, y_NE))
        delta_NE = _projected(layer.out, out_NHD.flatten(1))
        x_NE, y_NE, _ = of_layers.add_norm(x_NE, delta_NE, layer.post_norm, eps)
        delta_NE = _projected(layer.down, of_layers.gate(_projected(layer.gate_up, y_NE)))
    normed: Tensor = of_layers.add_norm(x_NE, delta_NE, decoder.norm_weight, eps)[1]
    return normed


def _projected(joined: Joined, x_NE: Tensor) -> Tensor:
    return product(x_NE, joined.weight, joined.bias, dtype=x_NE.dtype)


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


def moved(
    values: Sequence[float] | np.ndarray, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        # A copy out of pinned memory is queued; for any other the host would wait its turn.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
