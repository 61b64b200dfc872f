"""Each Triton kernel of the CUDA engine equals its reference in plain torch.

Without a GPU: `make kernels`.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from skyfleet.engines.cuda import torch_kernels
from skyfleet.engines.cuda.prefix_groups import PrefixGroups

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter does not support bfloat16 matrix products.
LOW_PRECISION = torch.float16 if INTERPRETED else torch.bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()),
        reason="needs a CUDA device, or Triton's interpreter: make kernels",
    ),
]

BLOCK_SIZE, KV_HEADS, HEADS, HEAD_DIM, ROWS = 16, 3, 9, 64, 5


def state(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """KV blocks, and five slots of which the fourth is inactive."""
    torch.manual_seed(0)
    keys = torch.randn(40, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=dtype)
    values = torch.randn_like(keys)
    lengths = torch.tensor([0, 15, 16, 40, 95], device=DEVICE, dtype=torch.int32)
    active = torch.tensor([1, 1, 1, 0, 1], device=DEVICE, dtype=torch.int32)
    block_table = 1 + torch.randperm(39, device=DEVICE)[: ROWS * 6].view(ROWS, 6).int()
    return keys, values, lengths, active, block_table


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (LOW_PRECISION, 2e-2)])
def test_decode_attention_equals_the_reference(dtype: torch.dtype, tolerance: float) -> None:
    from skyfleet.engines.cuda import triton_attention

    keys, values, lengths, active, block_table = state(dtype)
    q = torch.randn(ROWS, HEADS, HEAD_DIM, device=DEVICE, dtype=dtype)
    result = triton_attention.paged_decode_attention(q, keys, values, lengths, active, block_table)
    expected = torch_kernels.paged_decode_attention(q, keys, values, lengths, active, block_table)
    on = active.bool()
    torch.testing.assert_close(result[on], expected[on], atol=tolerance, rtol=tolerance)


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """The same bits on a GPU. The interpreter multiplies with BLAS, whose order depends on the CPU."""
    if INTERPRETED:
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
    else:
        assert torch.equal(one, other)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (32, 8, 128), (16, 8, 128)])
def test_a_query_has_the_same_bits_in_decoding_and_in_prefill(
    heads: int, kv_heads: int, width: int
) -> None:
    from skyfleet.engines.cuda import triton_attention
    from skyfleet.models.fused import triton_flash_attention

    lengths = torch.tensor([0, 15, 95, 300, 1000], device=DEVICE, dtype=torch.int32)
    block_table = 1 + torch.arange(5 * 63, device=DEVICE, dtype=torch.int32).view(5, 63)
    keys = 8 * torch.randn(
        1 + 5 * 63, BLOCK_SIZE, kv_heads, width, device=DEVICE, dtype=LOW_PRECISION
    )
    values, active = torch.randn_like(keys), torch.ones_like(lengths)
    # Scores as large as a model's: small ones would hide differences in rounding.
    q = 8 * torch.randn(ROWS, heads, width, device=DEVICE, dtype=LOW_PRECISION)
    decoded = triton_attention.paged_decode_attention(q, keys, values, lengths, active, block_table)
    for row, length in enumerate((lengths + 1).tolist()):
        token = torch.arange(length, device=DEVICE)
        cells = block_table[row].long()[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE
        k, v = keys.flatten(0, 1)[cells], values.flatten(0, 1)[cells]
        # In a prompt the same query is one of many: here the last one.
        queries = torch.randn(length, heads, width, device=DEVICE, dtype=LOW_PRECISION)
        queries[-1] = q[row]
        ends = torch.tensor([0, length], device=DEVICE, dtype=torch.int32)
        prefilled, _ = triton_flash_attention.flash_forward(queries, k, v, ends, ends, length)
        assert_same(prefilled[-1], decoded[row])


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (32, 8, 128), (16, 2, 128)])
def test_a_prefix_group_has_the_same_bits_as_separate_sequences(
    heads: int, kv_heads: int, width: int
) -> None:
    from skyfleet.engines.cuda import triton_attention

    torch.manual_seed(0)
    lengths = torch.tensor([129, 140, 200, 20, 150], device=DEVICE, dtype=torch.int32)
    own = 1 + np.arange(5 * 13, dtype=np.int32).reshape(5, 13)
    own[[1, 2], :9] = own[0, :9]  # the first three share 144 tokens, of which 128 are whole blocks
    block_table = torch.from_numpy(own).to(DEVICE)
    keys = torch.randn(70, BLOCK_SIZE, kv_heads, width, device=DEVICE, dtype=LOW_PRECISION)
    values, active = torch.randn_like(keys), torch.ones_like(lengths)
    q = torch.randn(5, heads, width, device=DEVICE, dtype=LOW_PRECISION)
    alone = triton_attention.paged_decode_attention(q, keys, values, lengths, active, block_table)
    groups = PrefixGroups.allocate(5, heads, width, torch.device(DEVICE))
    assert groups.update(own, dict(enumerate(lengths.tolist())))
    assert groups.shared_len_S.tolist() == [128, 128, 128, 0, 0]
    together = triton_attention.paged_decode_attention(
        q, keys, values, lengths, active, block_table, groups
    )
    assert_same(together, alone)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_equals_the_reference(dtype: torch.dtype, normed: bool) -> None:
    from skyfleet.engines.cuda import triton_kernels

    keys, values, lengths, active, block_table = state(dtype)
    qkv = torch.randn(ROWS, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=DEVICE, dtype=dtype)
    cos, sin = torch.randn(2, 96, HEAD_DIM, device=DEVICE).unbind()
    norms = (
        (
            torch.rand(HEAD_DIM, device=DEVICE, dtype=dtype),
            torch.rand(HEAD_DIM, device=DEVICE, dtype=dtype),
        )
        if normed
        else None
    )
    reference = [(keys.clone(), values.clone()) for _ in range(2)]
    queries = [
        kernels.write_kv(qkv, k, v, cos, sin, norms, lengths, active, block_table, eps=1e-6)
        for kernels, (k, v) in zip((triton_kernels, torch_kernels), reference, strict=True)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(queries[0], queries[1], atol=tolerance, rtol=tolerance)
    for one, other in zip(*reference, strict=True):
        torch.testing.assert_close(one[1:], other[1:], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("vocabulary", [5, 1000, 49152, 151_936])
def test_sample_token_equals_the_reference(vocabulary: int) -> None:
    from skyfleet.engines.cuda import triton_kernels

    torch.manual_seed(0)
    logits = 4 * torch.randn(6, vocabulary, device=DEVICE)
    logits[5, : vocabulary // 2] = -torch.inf
    logits[5, -2:] = 100.0  # slot 2 is greedy, and two tokens are equally likely
    slots = torch.tensor([7, 0, 3, 4, 1, 2], device=DEVICE, dtype=torch.int32)

    def sample(kernels: object) -> dict[str, Tensor]:
        made = torch.Generator(DEVICE).manual_seed(1)
        slot_state = {
            "inv_temperatures_S": torch.tensor([1, 2, 0, 1, 0.5, 1, 1, 1.3], device=DEVICE),
            "uniforms_SW": torch.rand(8, 4, device=DEVICE, dtype=torch.float64, generator=made),
            "stop_ids_SZ": torch.full((8, 8), -1, device=DEVICE, dtype=torch.int32),
            "tokens_S": torch.zeros(8, device=DEVICE, dtype=torch.int64),
            "lengths_S": torch.arange(8, device=DEVICE, dtype=torch.int32),
            "active_S": torch.tensor([1, 1, 1, 1, 0, 1, 1, 1], device=DEVICE, dtype=torch.int32),
            "n_generated_S": torch.tensor(
                [0, 1, 2, 0, 1, 2, 0, 1], device=DEVICE, dtype=torch.int32
            ),
            "max_new_tokens_S": torch.full((8,), 2, device=DEVICE, dtype=torch.int32),
            "step_1": torch.tensor([1], device=DEVICE, dtype=torch.int32),
            "out_tokens_KS": torch.full((3, 8), -1, device=DEVICE, dtype=torch.int32),
            "out_logprobs_KS": torch.zeros(3, 8, device=DEVICE),
        }
        slot_state["stop_ids_SZ"][0, 0] = logits[1].argmax()
        kernels.sample_token(logits, slots, **slot_state)  # type: ignore[attr-defined]
        return slot_state

    result, expected = sample(triton_kernels), sample(torch_kernels)
    for name, values in expected.items():
        torch.testing.assert_close(result[name], values, atol=1e-4, rtol=1e-4, msg=name)
