"""Each Triton kernel of the layers equals its reference in plain torch.

Without a GPU: `make kernels`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from skyfleet.models.fused import torch_kernels as reference
from skyfleet.models.fused.head_layout import HeadLayout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
# The interpreter does not support bfloat16 matrix products.
LOW_PRECISION = torch.float16 if INTERPRETED else torch.bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()),
        reason="needs a CUDA device, or Triton's interpreter: make kernels",
    ),
]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("is_first", [False, True])
def test_add_norm_equals_the_reference(
    dtype: torch.dtype, tolerance: float, is_first: bool
) -> None:
    from skyfleet.models.fused import triton_kernels

    torch.manual_seed(0)
    x, delta, weight = (
        random_tensor(7, 576),
        random_tensor(7, 576, dtype=dtype),
        random_tensor(576, dtype=dtype),
    )
    dsum, dout = random_tensor(7, 576), random_tensor(7, 576, dtype=dtype)
    given = (None if is_first else x, delta, weight, 1e-5)
    result, expected = triton_kernels.add_norm(*given), reference.add_norm(*given)
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    sums, _, scale = expected
    back = (None if is_first else dsum, dout, sums, scale, weight)
    torch.testing.assert_close(
        triton_kernels.add_norm_backward(*back),
        reference.add_norm_backward(*back),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_equals_the_reference(dtype: torch.dtype, tolerance: float, normed: bool) -> None:
    from skyfleet.models.fused import triton_kernels

    torch.manual_seed(0)
    norms = (random_tensor(64, dtype=dtype), random_tensor(64, dtype=dtype)) if normed else None
    heads = HeadLayout(n_heads=9, n_kv_heads=3, head_dim=64, norms=norms, eps=1e-5)
    qkv = random_tensor(6, 15 * 64, dtype=dtype)
    tables = random_tensor(50, 64), random_tensor(50, 64)
    positions = torch.tensor([0, 49, 3, 3, 7, 11], device=DEVICE)
    given = (qkv, heads, *tables, positions)
    torch.testing.assert_close(
        triton_kernels.apply_rope(*given),
        reference.apply_rope(*given),
        atol=tolerance,
        rtol=tolerance,
    )
    dq, dk, dv = (random_tensor(6, n, 64, dtype=dtype) for n in (9, 3, 3))
    torch.testing.assert_close(
        triton_kernels.rope_backward(dq, dk, dv, *given),
        reference.rope_backward(dq, dk, dv, *given),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_silu_mul_equals_the_reference(dtype: torch.dtype, tolerance: float) -> None:
    from skyfleet.models.fused import triton_kernels

    both, dout = random_tensor(5, 2 * 1536, dtype=dtype), random_tensor(5, 1536, dtype=dtype)
    torch.testing.assert_close(
        triton_kernels.silu_mul(both), reference.silu_mul(both), atol=tolerance, rtol=tolerance
    )
    torch.testing.assert_close(
        triton_kernels.silu_mul_backward(dout, both),
        reference.silu_mul_backward(dout, both),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize("vocabulary", [5, 4096, 9000])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_token_logprobs_equal_the_reference(vocabulary: int, with_entropy: bool) -> None:
    from skyfleet.models.fused import triton_logprobs

    torch.manual_seed(0)
    logits = 6 * random_tensor(4, vocabulary)
    chosen = torch.tensor([0, vocabulary - 1, 2, 2], device=DEVICE)
    result, expected = (k.token_logprobs(logits, chosen, 0.8) for k in (triton_logprobs, reference))
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    _, entropy, total = expected
    back = (random_tensor(4), random_tensor(4) if with_entropy else None, 0.8, torch.float32)
    torch.testing.assert_close(
        triton_logprobs.token_logprobs_backward(logits, chosen, total, entropy, *back),
        reference.token_logprobs_backward(logits, chosen, total, entropy, *back),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize(("n", "vocabulary", "width"), [(4, 300, 64), (130, 128, 72), (3, 9, 20)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_head_gradients_with_recomputed_logits_equal_the_reference(
    n: int, vocabulary: int, width: int, with_entropy: bool
) -> None:
    from skyfleet.models.fused import triton_logprobs

    torch.manual_seed(0)
    hidden, head = (
        random_tensor(n, width, dtype=LOW_PRECISION),
        random_tensor(vocabulary, width, dtype=LOW_PRECISION) / 3,
    )
    chosen = torch.randint(vocabulary, (n,), device=DEVICE)
    _, entropy, total = reference.token_logprobs(hidden.float() @ head.float().T, chosen, 0.8)
    given = (
        hidden,
        head,
        chosen,
        total,
        entropy,
        random_tensor(n),
        random_tensor(n) if with_entropy else None,
        0.8,
    )
    result, expected = (k.head_logprobs_backward(*given) for k in (triton_logprobs, reference))
    assert result.dtype == expected.dtype == LOW_PRECISION
    torch.testing.assert_close(result, expected, atol=1e-2, rtol=1e-2)


def test_sums_of_shared_rows_equal_the_reference() -> None:
    from skyfleet.models.fused import triton_flash_attention

    taken = random_tensor(6, 3, 64)
    starts = torch.tensor([0, 3, 3, 4, 6], device=DEVICE, dtype=torch.int32)
    places = torch.tensor([0, 2, 4, 1, 3, 5], device=DEVICE)
    torch.testing.assert_close(
        triton_flash_attention.sum_shared_rows(taken, starts, places),
        reference.sum_shared_rows(taken, starts, places),
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (LOW_PRECISION, 2e-2)])
@pytest.mark.parametrize("columns", [100, 3000])
@pytest.mark.parametrize("biased", [False, True])
def test_matmul_equals_the_reference(
    dtype: torch.dtype, tolerance: float, columns: int, biased: bool
) -> None:
    from skyfleet.models.fused import triton_matmul

    torch.manual_seed(0)
    x, weight = random_tensor(70, 96, dtype=dtype), random_tensor(columns, 96, dtype=dtype) / 10
    bias = random_tensor(columns, dtype=dtype) if biased else None
    torch.testing.assert_close(
        triton_matmul.matmul(x, weight, bias, dtype=dtype),
        reference.matmul(x, weight, bias, dtype=dtype),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize("rows", [0, 3, 70, 300])
@pytest.mark.parametrize("depth", [20, 96, 256])
def test_matmul_without_tma(rows: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyfleet.models.fused import triton_matmul

    old = triton_matmul.DeviceTraits(has_tma=False, has_small_shared_memory=True)
    monkeypatch.setattr(triton_matmul, "device_traits", lambda _: old)
    torch.manual_seed(0)
    x, weight = (
        random_tensor(rows, depth, dtype=LOW_PRECISION),
        random_tensor(130, depth, dtype=LOW_PRECISION) / 10,
    )
    result = triton_matmul.matmul(x, weight, dtype=torch.float32)
    torch.testing.assert_close(result, x.float() @ weight.float().T, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(INTERPRETED, reason="bits depend on the device")
def test_a_row_of_a_matmul_has_the_same_bits_in_any_batch() -> None:
    from skyfleet.models.fused import triton_matmul

    torch.manual_seed(0)
    for depth, columns in ((576, 960), (1536, 576), (576, 49152), (4096, 6144)):
        x = random_tensor(5000, depth, dtype=torch.bfloat16)
        weight = random_tensor(columns, depth, dtype=torch.bfloat16)
        whole = triton_matmul.matmul(x, weight, dtype=torch.float32)
        for n in (1, 48, 512, 1024, 1025):
            part = triton_matmul.matmul(x[:n], weight, dtype=torch.float32)
            assert torch.equal(part, whole[:n]), (depth, columns, n)


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE, dtype=torch.int32)


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, n_queries: Sequence[int], n_keys: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Attention in float32, one sequence at a time; the last query of a sequence sees all its keys."""
    outs, masses = [], []
    group, width = q.shape[1] // k.shape[1], q.shape[2]
    parts = zip(q.split(n_queries), k.split(n_keys), v.split(n_keys), strict=True)
    for mine, keys, values in parts:
        n, m = len(mine), len(keys)
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", mine, keys) * width**-0.5
        later = torch.arange(m, device=DEVICE) > torch.arange(m - n, m, device=DEVICE)[:, None]
        scores = scores.masked_fill(later, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        masses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(masses, dim=1)


def test_flash_attention_over_packed_sequences() -> None:
    from skyfleet.models.fused import triton_flash_attention

    torch.manual_seed(0)
    n_queries, n_keys = [5, 130, 1], [5, 200, 70]
    q, k, v = (
        random_tensor(n, h, 64, dtype=LOW_PRECISION) for n, h in ((136, 4), (275, 2), (275, 2))
    )
    result = triton_flash_attention.flash_forward(
        q, k, v, cu_seqlens(n_queries), cu_seqlens(n_keys), max(n_queries)
    )
    expected = attend_plainly(q.float(), k.float(), v.float(), n_queries, n_keys)
    torch.testing.assert_close(result[0].float(), expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(result[1], expected[1], atol=1e-3, rtol=1e-3)


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, n_queries: Sequence[int], n_keys: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    from skyfleet.models.fused import triton_flash_attention

    ends = cu_seqlens(n_queries), cu_seqlens(n_keys)
    out, total = triton_flash_attention.flash_forward(q, k, v, *ends, max(n_queries))
    return triton_flash_attention.flash_backward(
        dout, q, k, v, out, total, *ends, max(n_queries), max(n_keys)
    )


@pytest.mark.parametrize(
    ("n_queries", "n_keys"),
    [([1], [1]), ([5, 130, 1, 64], [5, 130, 1, 64]), ([30, 1, 128], [200, 70, 192])],
    ids=["one token", "ragged", "shared prefixes"],
)
@pytest.mark.parametrize(("heads", "width"), [((6, 2), 64), ((4, 4), 128), ((3, 1), 16)])
def test_flash_attention_gradients(
    n_queries: Sequence[int], n_keys: Sequence[int], heads: tuple[int, int], width: int
) -> None:
    torch.manual_seed(0)
    q, dout = (
        random_tensor(sum(n_queries), heads[0], width, dtype=LOW_PRECISION) for _ in range(2)
    )
    k, v = (random_tensor(sum(n_keys), heads[1], width, dtype=LOW_PRECISION) for _ in range(2))
    result = attention_gradients(q, k, v, dout, n_queries, n_keys)
    exact = tuple(x.float().requires_grad_() for x in (q, k, v))
    out, _ = attend_plainly(exact[0], exact[1], exact[2], n_queries, n_keys)
    expected = torch.autograd.grad(out, exact, dout.float())
    for mine, plain in zip(result, expected, strict=True):
        assert (mine.float() - plain).norm() <= 1e-2 * plain.norm() + 1e-4


@pytest.mark.parametrize("width", [32, 128])
def test_a_sequence_has_the_same_gradient_alone_and_in_a_pack(width: int) -> None:
    torch.manual_seed(0)
    n_queries, n_keys = [70, 33, 129], [70, 100, 129]
    q, dout = (random_tensor(sum(n_queries), 2, width, dtype=LOW_PRECISION) for _ in range(2))
    k, v = (random_tensor(sum(n_keys), 1, width, dtype=LOW_PRECISION) for _ in range(2))
    packed = attention_gradients(q, k, v, dout, n_queries, n_keys)
    alone = attention_gradients(
        q[70:103], k[70:170], v[70:170], dout[70:103], n_queries[1:2], n_keys[1:2]
    )
    places = slice(70, 103), slice(70, 170), slice(70, 170)
    for whole, write_kv, part in zip(packed, places, alone, strict=True):
        assert torch.equal(whole[write_kv], part)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one program at a time")
@pytest.mark.parametrize(("heads", "width"), [((9, 3), 64), ((16, 8), 128)])
def test_flash_attention_gradients_are_deterministic(heads: tuple[int, int], width: int) -> None:
    torch.manual_seed(0)
    lengths = [1024, 700, 1500, 1024] * 4
    q, dout = (random_tensor(sum(lengths), heads[0], width, dtype=LOW_PRECISION) for _ in range(2))
    k, v = (random_tensor(sum(lengths), heads[1], width, dtype=LOW_PRECISION) for _ in range(2))
    first = attention_gradients(q, k, v, dout, lengths, lengths)
    for _ in range(3):
        again = attention_gradients(q, k, v, dout, lengths, lengths)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
