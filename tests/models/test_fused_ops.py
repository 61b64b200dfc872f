"""Each fused op has the gradient that autograd computes for the plain formula."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from skyfleet.models.fused.flash_attention import SharedRows, gather_shared_rows
from skyfleet.models.fused.head_layout import HeadLayout
from skyfleet.models.fused.ops import add_norm, apply_rope, fused_linear, head_logprobs, silu_mul

EPS = 1e-5


def random_leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    total = sum((out * torch.randn_like(out)).sum() for out in outputs)
    return list(torch.autograd.grad(total, inputs, retain_graph=True))  # type: ignore[arg-type]


def test_add_norm_has_the_gradient_of_a_sum_and_its_norm() -> None:
    x, delta, weight = random_leaf(5, 8), random_leaf(5, 8), random_leaf(8)
    plain = x + delta
    expected = gradients((plain, rms_norm(plain, (8,), weight, EPS)), [x, delta, weight])
    torch.testing.assert_close(
        gradients(add_norm(x, delta, weight, EPS), [x, delta, weight]), expected
    )


def test_add_norm_without_a_residual() -> None:
    delta, weight = random_leaf(5, 8), random_leaf(8)
    expected = gradients((delta * 1, rms_norm(delta, (8,), weight, EPS)), [delta, weight])
    torch.testing.assert_close(
        gradients(add_norm(None, delta, weight, EPS), [delta, weight]), expected
    )


def rotate_plainly(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None) -> Tensor:
    if norm is not None:
        x = rms_norm(x, (x.shape[-1],), norm, EPS)
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def test_apply_rope_with_and_without_norms() -> None:
    positions = torch.tensor([0, 3, 1, 2, 7])
    cos, sin = torch.randn(2, 9, 8, dtype=torch.float64).unbind()
    for normed in (False, True):
        qkv, norms = random_leaf(5, (4 + 2 * 2) * 8), (random_leaf(8), random_leaf(8))
        heads = HeadLayout(
            n_heads=4, n_kv_heads=2, head_dim=8, norms=norms if normed else None, eps=EPS
        )
        q, k, v = torch.split(qkv.view(5, 8, 8), [4, 2, 2], dim=1)
        at = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        plain = (
            rotate_plainly(q, *at, norms[0] if normed else None),
            rotate_plainly(k, *at, norms[1] if normed else None),
            v * 1,
        )
        inputs = [qkv, *norms] if normed else [qkv]
        result = apply_rope(qkv, heads, (cos, sin), positions)
        torch.testing.assert_close(result, plain)
        torch.testing.assert_close(gradients(result, inputs), gradients(plain, inputs))


def test_silu_mul() -> None:
    both = random_leaf(5, 12)
    first, second = both.chunk(2, dim=-1)
    torch.testing.assert_close(
        gradients((silu_mul(both),), [both]), gradients((silu(first) * second,), [both])
    )


def test_fused_linear_equals_separate_projections() -> None:
    x, parts = (
        random_leaf(5, 8),
        [random_leaf(4, 8), random_leaf(2, 8), random_leaf(4), random_leaf(2)],
    )
    weight, bias = torch.cat(parts[:2]).detach(), torch.cat(parts[2:]).detach()
    plain = torch.cat([linear(x, parts[0], parts[2]), linear(x, parts[1], parts[3])], dim=1)
    result = fused_linear(x, weight, bias, parts)
    torch.testing.assert_close(result, plain)
    torch.testing.assert_close(gradients((result,), [x, *parts]), gradients((plain,), [x, *parts]))


def test_chunked_logprobs_with_and_without_an_entropy_gradient() -> None:
    hidden, head, chosen = (
        random_leaf(7, 8),
        random_leaf(11, 8),
        torch.tensor([0, 10, 3, 3, 5, 1, 2]),
    )
    logprobs = torch.log_softmax(linear(hidden, head) / 0.7, dim=-1)
    picked = logprobs.gather(1, chosen[:, None]).squeeze(1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    for both in (False, True):
        result = head_logprobs(
            hidden, head, chosen, temperature=0.7, chunk_size=3, entropy_gradient=both
        )
        torch.testing.assert_close(result, (picked, entropy))
        assert result[1].requires_grad is both
        n = 2 if both else 1
        torch.testing.assert_close(
            gradients(result[:n], [hidden, head]), gradients((picked, entropy)[:n], [hidden, head])
        )


def test_gathered_shared_rows_sum_their_gradients() -> None:
    x, rows = random_leaf(4, 2, 3), torch.tensor([0, 1, 0, 2, 0, 3])
    shared = SharedRows(
        rows_L=rows,
        starts_R=torch.tensor([0, 3, 4, 5, 6]),
        places_L=torch.tensor([0, 2, 4, 1, 3, 5]),
    )
    torch.testing.assert_close(
        gradients((gather_shared_rows(x, shared),), [x]), gradients((x[rows],), [x])
    )
