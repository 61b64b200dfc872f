"""Each Triton kernel does what its twin in plain torch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyfleet.engines.cuda import torch_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE, KV_HEADS, HEADS, WIDTH, ROWS = 16, 3, 9, 64, 5


def state(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pages of keys and values, and five slots of which the fourth rests."""
    torch.manual_seed(0)
    keys = torch.randn(40, PAGE, KV_HEADS, WIDTH, device="cuda", dtype=dtype)
    values = torch.randn_like(keys)
    lengths = torch.tensor([0, 15, 16, 40, 95], device="cuda", dtype=torch.int32)
    active = torch.tensor([1, 1, 1, 0, 1], device="cuda", dtype=torch.int32)
    table = 1 + torch.randperm(39, device="cuda")[: ROWS * 6].view(ROWS, 6).int()
    return keys, values, lengths, active, table


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention(dtype: torch.dtype, tolerance: float) -> None:
    from skyfleet.engines.cuda import triton_kernels

    keys, values, lengths, active, table = state(dtype)
    q = torch.randn(ROWS, HEADS, WIDTH, device="cuda", dtype=dtype)
    said = triton_kernels.attend(q, keys, values, lengths, active, table)
    expected = torch_kernels.attend(q, keys, values, lengths, active, table)
    on = active.bool()
    torch.testing.assert_close(said[on], expected[on], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_placing(dtype: torch.dtype, normed: bool) -> None:
    from skyfleet.engines.cuda import triton_kernels

    keys, values, lengths, active, table = state(dtype)
    qkv = torch.randn(ROWS, (HEADS + 2 * KV_HEADS) * WIDTH, device="cuda", dtype=dtype)
    cos, sin = (torch.randn(96, WIDTH, device="cuda", dtype=dtype) for _ in range(2))
    norms = (
        (
            torch.rand(WIDTH, device="cuda", dtype=dtype),
            torch.rand(WIDTH, device="cuda", dtype=dtype),
        )
        if normed
        else None
    )
    twins = [(keys.clone(), values.clone()) for _ in range(2)]
    queries = [
        kernels.place(qkv, k, v, cos, sin, norms, lengths, active, table, eps=1e-6)
        for kernels, (k, v) in zip((triton_kernels, torch_kernels), twins, strict=True)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(queries[0], queries[1], atol=tolerance, rtol=tolerance)
    for one, other in zip(*twins, strict=True):
        torch.testing.assert_close(one[1:], other[1:], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_gates(dtype: torch.dtype) -> None:
    from skyfleet.engines.cuda import triton_kernels

    torch.manual_seed(0)
    x, delta = (torch.randn(7, 576, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.randn(576, device="cuda", dtype=dtype)
    one, other = x.clone(), x.clone()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        triton_kernels.add_norm(one, delta, weight, 1e-5),
        torch_kernels.add_norm(other, delta, weight, 1e-5),
        atol=tolerance,
        rtol=tolerance,
    )
    assert torch.equal(one, other)
    wide = torch.randn(7, 3072, device="cuda", dtype=dtype)
    torch.testing.assert_close(
        triton_kernels.gate(wide), torch_kernels.gate(wide), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("vocabulary", [5, 1000, 49152, 151_936])
def test_speaking(vocabulary: int) -> None:
    from skyfleet.engines.cuda import triton_kernels

    torch.manual_seed(0)
    logits = 4 * torch.randn(6, vocabulary, device="cuda")
    logits[5, : vocabulary // 2] = -torch.inf
    logits[5, -2:] = 100.0  # slot 2 is greedy, and two tokens are as likely
    slots = torch.tensor([7, 0, 3, 4, 1, 2], device="cuda", dtype=torch.int32)

    def spoken(kernels: object) -> dict[str, Tensor]:
        made = torch.Generator("cuda").manual_seed(1)
        slot_state = {
            "temperatures_S": torch.tensor([1, 0.5, 0, 1, 2, 1, 1, 1], device="cuda"),
            "uniforms_SW": torch.rand(8, 4, device="cuda", dtype=torch.float64, generator=made),
            "stops_SZ": torch.full((8, 8), -1, device="cuda", dtype=torch.int32),
            "tokens_S": torch.zeros(8, device="cuda", dtype=torch.int64),
            "lengths_S": torch.arange(8, device="cuda", dtype=torch.int32),
            "active_S": torch.tensor([1, 1, 1, 1, 0, 1, 1, 1], device="cuda", dtype=torch.int32),
            "said_S": torch.tensor([0, 1, 2, 0, 1, 2, 0, 1], device="cuda", dtype=torch.int32),
            "most_S": torch.full((8,), 2, device="cuda", dtype=torch.int32),
            "step_1": torch.tensor([1], device="cuda", dtype=torch.int32),
            "out_tokens_KS": torch.full((3, 8), -1, device="cuda", dtype=torch.int32),
            "out_logprobs_KS": torch.zeros(3, 8, device="cuda"),
        }
        slot_state["stops_SZ"][0, 0] = logits[1].argmax()
        kernels.speak(logits, slots, **slot_state)  # type: ignore[attr-defined]
        return slot_state

    said, expected = spoken(triton_kernels), spoken(torch_kernels)
    for name, values in expected.items():
        torch.testing.assert_close(said[name], values, atol=1e-4, rtol=1e-4, msg=name)
