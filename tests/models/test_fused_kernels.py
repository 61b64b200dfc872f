"""Each Triton kernel of the layers does what its twin in plain torch does.

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

from skyfleet.models.fused import torch_kernels as twins
from skyfleet.models.fused.shapes import Heads

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
# The interpreter multiplies no bfloat16 matrices.
COARSE = torch.float16 if INTERPRETED else torch.bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()),
        reason="needs a CUDA device, or Triton's interpreter: make kernels",
    ),
]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("begins", [False, True])
def test_norms(dtype: torch.dtype, tolerance: float, begins: bool) -> None:
    from skyfleet.models.fused import triton_kernels

    torch.manual_seed(0)
    x, delta, weight = drawn(7, 576), drawn(7, 576, dtype=dtype), drawn(576, dtype=dtype)
    dsum, dout = drawn(7, 576), drawn(7, 576, dtype=dtype)
    given = (None if begins else x, delta, weight, 1e-5)
    said, expected = triton_kernels.add_norm(*given), twins.add_norm(*given)
    torch.testing.assert_close(said, expected, atol=tolerance, rtol=tolerance)
    sums, _, scale = expected
    back = (None if begins else dsum, dout, sums, scale, weight)
    torch.testing.assert_close(
        triton_kernels.add_norm_back(*back),
        twins.add_norm_back(*back),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_turns(dtype: torch.dtype, tolerance: float, normed: bool) -> None:
    from skyfleet.models.fused import triton_kernels

    torch.manual_seed(0)
    norms = (drawn(64, dtype=dtype), drawn(64, dtype=dtype)) if normed else None
    heads = Heads(queries=9, keys=3, width=64, norms=norms, eps=1e-5)
    qkv = drawn(6, 15 * 64, dtype=dtype)
    tables = drawn(50, 64), drawn(50, 64)
    positions = torch.tensor([0, 49, 3, 3, 7, 11], device=DEVICE)
    given = (qkv, heads, *tables, positions)
    torch.testing.assert_close(
        triton_kernels.turn(*given), twins.turn(*given), atol=tolerance, rtol=tolerance
    )
    dq, dk, dv = (drawn(6, n, 64, dtype=dtype) for n in (9, 3, 3))
    torch.testing.assert_close(
        triton_kernels.turn_back(dq, dk, dv, *given),
        twins.turn_back(dq, dk, dv, *given),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_gates(dtype: torch.dtype, tolerance: float) -> None:
    from skyfleet.models.fused import triton_kernels

    both, dout = drawn(5, 2 * 1536, dtype=dtype), drawn(5, 1536, dtype=dtype)
    torch.testing.assert_close(
        triton_kernels.gate(both), twins.gate(both), atol=tolerance, rtol=tolerance
    )
    torch.testing.assert_close(
        triton_kernels.gate_back(dout, both),
        twins.gate_back(dout, both),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize("vocabulary", [5, 4096, 9000])
@pytest.mark.parametrize("entropic", [False, True])
def test_scores(vocabulary: int, entropic: bool) -> None:
    from skyfleet.models.fused import triton_scores

    torch.manual_seed(0)
    logits = 6 * drawn(4, vocabulary)
    chosen = torch.tensor([0, vocabulary - 1, 2, 2], device=DEVICE)
    said, expected = (k.score(logits, chosen, 0.8) for k in (triton_scores, twins))
    torch.testing.assert_close(said, expected, atol=1e-5, rtol=1e-5)
    _, entropy, total = expected
    back = (drawn(4), drawn(4) if entropic else None, 0.8, torch.float32)
    torch.testing.assert_close(
        triton_scores.score_back(logits, chosen, total, entropy, *back),
        twins.score_back(logits, chosen, total, entropy, *back),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize(("n", "vocabulary", "width"), [(4, 300, 64), (130, 128, 72), (3, 9, 20)])
@pytest.mark.parametrize("entropic", [False, True])
def test_the_gradient_of_scores_whose_logits_are_gone(
    n: int, vocabulary: int, width: int, entropic: bool
) -> None:
    from skyfleet.models.fused import triton_head

    torch.manual_seed(0)
    hidden, head = drawn(n, width, dtype=COARSE), drawn(vocabulary, width, dtype=COARSE) / 3
    chosen = torch.randint(vocabulary, (n,), device=DEVICE)
    _, entropy, total = twins.score(hidden.float() @ head.float().T, chosen, 0.8)
    given = (hidden, head, chosen, total, entropy, drawn(n), drawn(n) if entropic else None, 0.8)
    said, expected = (k.scores_back(*given) for k in (triton_head, twins))
    assert said.dtype == expected.dtype == COARSE
    torch.testing.assert_close(said, expected, atol=1e-2, rtol=1e-2)


def test_folds() -> None:
    from skyfleet.models.fused import triton_scores

    taken = drawn(6, 3, 64)
    starts = torch.tensor([0, 3, 3, 4, 6], device=DEVICE, dtype=torch.int32)
    places = torch.tensor([0, 2, 4, 1, 3, 5], device=DEVICE)
    torch.testing.assert_close(
        triton_scores.fold(taken, starts, places), twins.fold(taken, starts, places)
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (COARSE, 2e-2)])
@pytest.mark.parametrize("columns", [100, 3000])
@pytest.mark.parametrize("biased", [False, True])
def test_products(dtype: torch.dtype, tolerance: float, columns: int, biased: bool) -> None:
    from skyfleet.models.fused import triton_products

    torch.manual_seed(0)
    x, weight = drawn(70, 96, dtype=dtype), drawn(columns, 96, dtype=dtype) / 10
    bias = drawn(columns, dtype=dtype) if biased else None
    torch.testing.assert_close(
        triton_products.product(x, weight, bias, dtype=dtype),
        twins.product(x, weight, bias, dtype=dtype),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize("rows", [0, 3, 70, 300])
@pytest.mark.parametrize("depth", [20, 96, 256])
def test_products_on_cards_without_a_copy_engine(
    rows: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyfleet.models.fused import triton_products

    old = triton_products.Card(fetches=False, is_small=True)
    monkeypatch.setattr(triton_products, "card_of", lambda _: old)
    torch.manual_seed(0)
    x, weight = drawn(rows, depth, dtype=COARSE), drawn(130, depth, dtype=COARSE) / 10
    said = triton_products.product(x, weight, dtype=torch.float32)
    torch.testing.assert_close(said, x.float() @ weight.float().T, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(INTERPRETED, reason="bits are a matter of the device")
def test_a_row_of_a_product_is_the_same_bits_in_any_batch() -> None:
    from skyfleet.models.fused import triton_products

    torch.manual_seed(0)
    for depth, columns in ((576, 960), (1536, 576), (576, 49152), (4096, 6144)):
        x = drawn(5000, depth, dtype=torch.bfloat16)
        weight = drawn(columns, depth, dtype=torch.bfloat16)
        whole = triton_products.product(x, weight, dtype=torch.float32)
        for n in (1, 48, 512, 1024, 1025):
            part = triton_products.product(x[:n], weight, dtype=torch.float32)
            assert torch.equal(part, whole[:n]), (depth, columns, n)


def ends_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE, dtype=torch.int32)


def plainly_attended(
    q: Tensor, k: Tensor, v: Tensor, asked: Sequence[int], known: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """What float32 says, sequence by sequence; a sequence's last query sees all of its keys."""
    outs, masses = [], []
    group, width = q.shape[1] // k.shape[1], q.shape[2]
    parts = zip(q.split(asked), k.split(known), v.split(known), strict=True)
    for mine, keys, values in parts:
        n, m = len(mine), len(keys)
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", mine, keys) * width**-0.5
        later = torch.arange(m, device=DEVICE) > torch.arange(m - n, m, device=DEVICE)[:, None]
        scores = scores.masked_fill(later, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        masses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(masses, dim=1)


def test_attention_of_prompts_without_padding() -> None:
    from skyfleet.models.fused import triton_products

    torch.manual_seed(0)
    asked, known = [5, 130, 1], [5, 200, 70]
    q, k, v = (drawn(n, h, 64, dtype=COARSE) for n, h in ((136, 4), (275, 2), (275, 2)))
    said = triton_products.read(q, k, v, ends_of(asked), ends_of(known), max(asked))
    expected = plainly_attended(q.float(), k.float(), v.float(), asked, known)
    torch.testing.assert_close(said[0].float(), expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(said[1], expected[1], atol=1e-3, rtol=1e-3)


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, asked: Sequence[int], known: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    from skyfleet.models.fused import triton_gradient, triton_products

    ends = ends_of(asked), ends_of(known)
    out, total = triton_products.read(q, k, v, *ends, max(asked))
    return triton_gradient.read_back(dout, q, k, v, out, total, *ends, max(asked), max(known))


@pytest.mark.parametrize(
    ("asked", "known"),
    [([1], [1]), ([5, 130, 1, 64], [5, 130, 1, 64]), ([30, 1, 128], [200, 70, 192])],
    ids=["one token", "ragged", "shared beginnings"],
)
@pytest.mark.parametrize(("heads", "width"), [((6, 2), 64), ((4, 4), 128), ((3, 1), 16)])
def test_the_gradient_of_attention(
    asked: Sequence[int], known: Sequence[int], heads: tuple[int, int], width: int
) -> None:
    torch.manual_seed(0)
    q, dout = (drawn(sum(asked), heads[0], width, dtype=COARSE) for _ in range(2))
    k, v = (drawn(sum(known), heads[1], width, dtype=COARSE) for _ in range(2))
    said = attention_gradients(q, k, v, dout, asked, known)
    exact = tuple(x.float().requires_grad_() for x in (q, k, v))
    out, _ = plainly_attended(exact[0], exact[1], exact[2], asked, known)
    expected = torch.autograd.grad(out, exact, dout.float())
    for mine, plain in zip(said, expected, strict=True):
        assert (mine.float() - plain).norm() <= 1e-2 * plain.norm() + 1e-4


@pytest.mark.parametrize("width", [32, 128])
def test_a_sequence_has_the_same_gradient_alone_and_in_a_pack(width: int) -> None:
    torch.manual_seed(0)
    asked, known = [70, 33, 129], [70, 100, 129]
    q, dout = (drawn(sum(asked), 2, width, dtype=COARSE) for _ in range(2))
    k, v = (drawn(sum(known), 1, width, dtype=COARSE) for _ in range(2))
    packed = attention_gradients(q, k, v, dout, asked, known)
    alone = attention_gradients(
        q[70:103], k[70:170], v[70:170], dout[70:103], asked[1:2], known[1:2]
    )
    places = slice(70, 103), slice(70, 170), slice(70, 170)
    for whole, place, part in zip(packed, places, alone, strict=True):
        assert torch.equal(whole[place], part)


@pytest.mark.skipif(INTERPRETED, reason="one program at a time has one order")
@pytest.mark.parametrize(("heads", "width"), [((9, 3), 64), ((16, 8), 128)])
def test_gradients_of_attention_are_the_same_bits_every_time(
    heads: tuple[int, int], width: int
) -> None:
    torch.manual_seed(0)
    lengths = [1024, 700, 1500, 1024] * 4
    q, dout = (drawn(sum(lengths), heads[0], width, dtype=COARSE) for _ in range(2))
    k, v = (drawn(sum(lengths), heads[1], width, dtype=COARSE) for _ in range(2))
    first = attention_gradients(q, k, v, dout, lengths, lengths)
    for _ in range(3):
        again = attention_gradients(q, k, v, dout, lengths, lengths)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
