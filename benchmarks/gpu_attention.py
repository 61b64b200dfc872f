"""Attention's gradient on one GPU: ours beside PyTorch's flash attention, deterministic and not.

Packed causal sequences in bfloat16, random numbers. Ours is checked against float32 and must give
the same bits twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyfleet.models.fused.flash_attention import CuSeqlens
from skyfleet.models.fused.ops import kernels

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    n_sequences: int
    length: int


SHAPES = (
    Shape(name="SmolLM2-135M", heads=9, kv_heads=3, head_dim=64, n_sequences=32, length=1024),
    Shape(name="Qwen3-0.6B", heads=16, kv_heads=8, head_dim=128, n_sequences=4, length=4096),
    Shape(name="Qwen3-8B", heads=32, kv_heads=8, head_dim=128, n_sequences=4, length=4096),
)


class Case:
    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape, cuda = shape, torch.device("cuda")
        n = shape.n_sequences * shape.length

        def random_heads(heads: int) -> Tensor:
            return torch.randn(n, heads, shape.head_dim, device=cuda).bfloat16()

        self.q, self.k, self.v = (
            random_heads(shape.heads),
            random_heads(shape.kv_heads),
            random_heads(shape.kv_heads),
        )
        self.dout = random_heads(shape.heads)
        self.nothing_random = torch.zeros(2, dtype=torch.uint64, device=cuda)
        lengths = np.full(shape.n_sequences, shape.length)
        self.cu_seqlens = CuSeqlens.from_lengths(lengths, lengths, cuda)
        self.out, self.lse = kernels(cuda, "flash_attention").flash_forward(
            self.q,
            self.k,
            self.v,
            self.cu_seqlens.queries,
            self.cu_seqlens.keys,
            self.cu_seqlens.max_queries,
        )

    def ours(self) -> Gradients:
        back: Callable[..., Gradients] = kernels(self.q.device, "flash_attention").flash_backward
        return back(self.dout, self.q, self.k, self.v, self.out, self.lse, *self._layout)

    def pytorch(self, *, deterministic: bool) -> Gradients:
        nothing_random = self.nothing_random
        torch.use_deterministic_algorithms(deterministic)
        try:
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                self.dout, self.q, self.k, self.v, self.out, self.lse, *self._layout,
                0.0, True, nothing_random, nothing_random,
            )  # fmt: skip
        finally:
            torch.use_deterministic_algorithms(False)
        return dq, dk, dv

    @property
    def _layout(self) -> tuple[Tensor, Tensor, int, int]:
        cu_seqlens = self.cu_seqlens
        return cu_seqlens.queries, cu_seqlens.keys, cu_seqlens.max_queries, cu_seqlens.max_keys

    def exact(self) -> list[Tensor]:
        """Of the first sequence, in float32."""
        first = slice(self.shape.length)
        inputs = [x[first].float().requires_grad_() for x in (self.q, self.k, self.v)]
        q_HLD, k_HLD, v_HLD = (x.transpose(0, 1) for x in inputs)
        out_HLD = torch.nn.functional.scaled_dot_product_attention(
            q_HLD, k_HLD, v_HLD, is_causal=True, enable_gqa=True
        )
        return list(torch.autograd.grad(out_HLD.transpose(0, 1), inputs, self.dout[first].float()))


def microseconds(run: Callable[[], Gradients], *, times: int = 10) -> float:
    """Median of three rounds, after one that nobody counts."""
    taken: list[float] = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            run()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) / times * 1e3)
    return round(median(taken[1:]), 1)


def measure(shape: Shape) -> dict[str, Any]:
    case = Case(shape)
    gradients, again, exact = case.ours(), case.ours(), case.exact()
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))
    apart = [
        float((one[: shape.length].float() - true).norm() / true.norm())
        for one, true in zip(gradients, exact, strict=True)
    ]
    assert max(apart) < 0.01, apart
    return {
        "shape": shape.name,
        "ours_us": microseconds(case.ours),
        "pytorch_deterministic_us": microseconds(lambda: case.pytorch(deterministic=True)),
        "pytorch_us": microseconds(lambda: case.pytorch(deterministic=False)),
        "relative_error": round(max(apart), 5),
    }


if __name__ == "__main__":
    # Only sums are compared, not the filling of memory that nobody reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    for shape in SHAPES:
        print(json.dumps(measure(shape)), flush=True)
