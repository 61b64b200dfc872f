"""CUDA graph capture, and the forward pass that prefill and decode graphs record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyfleet.models.decoder import Decoder
from skyfleet.models.fused.layers import FusedLayer, FusedLinear
from skyfleet.models.fused.ops import kernels, matmul

LayerAttention = Callable[[int, FusedLayer, Tensor], Tensor]
"""(layer index, layer, projected q/k/v [N, X]) -> attention output [N, H, D]."""


def run_layers(
    decoder: Decoder, layers: Sequence[FusedLayer], token_ids_N: Tensor, attend: LayerAttention
) -> Tensor:
    """Return the last layer's normed output [N, E], ready for `decoder.logits`.

    The learner computes a layer in `FusedLayer.__call__`. Both must stay identical.
    """
    ops, eps = kernels(token_ids_N.device), decoder.eps
    x_NE, delta_NE = None, decoder.embedding_weight[token_ids_N]
    for index, layer in enumerate(layers):
        x_NE, y_NE, _ = ops.add_norm(x_NE, delta_NE, layer.input_norm, eps)
        out_NHD = attend(index, layer, _project(layer.qkv, y_NE))
        delta_NE = _project(layer.out, out_NHD.flatten(1))
        x_NE, y_NE, _ = ops.add_norm(x_NE, delta_NE, layer.post_norm, eps)
        delta_NE = _project(layer.down, ops.silu_mul(_project(layer.gate_up, y_NE)))
    normed: Tensor = ops.add_norm(x_NE, delta_NE, decoder.norm_weight, eps)[1]
    return normed


def _project(linear: FusedLinear, x_NE: Tensor) -> Tensor:
    return matmul(x_NE, linear.weight, linear.bias, dtype=x_NE.dtype)


class CudaGraphRecorder:
    """Captures CUDA graphs that share one memory pool: a replay may overwrite another graph's
    output."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(
        self, work: Callable[[], Any], *, before: Callable[[], object] = lambda: None
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture `work`; return the graph and the output, which every replay writes to the same
        memory.

        Two warm-up runs, each after `before`, compile the kernels.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                before()
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # A learner in another thread may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        self._pool = self._pool or graph.pool()
        return graph, output


def copy_to_device(
    values: Sequence[float] | np.ndarray, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        # A copy from pinned memory is queued; the host would wait for any other copy.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
