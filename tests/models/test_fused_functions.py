"""Each fused step has the gradient that autograd finds for the same sum written plainly."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from skyfleet.models.fused.flash import SharedRows, take_shared
from skyfleet.models.fused.functions import add_norm, gate, joined_linear, scores, turn
from skyfleet.models.fused.shapes import Heads

EPS = 1e-5


def wanting(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    total = sum((out * torch.randn_like(out)).sum() for out in outputs)
    return list(torch.autograd.grad(total, inputs, retain_graph=True))  # type: ignore[arg-type]


def test_a_norm_of_a_sum() -> None:
    x, delta, weight = wanting(5, 8), wanting(5, 8), wanting(8)
    plain = x + delta
    expected = gradients((plain, rms_norm(plain, (8,), weight, EPS)), [x, delta, weight])
    torch.testing.assert_close(
        gradients(add_norm(x, delta, weight, EPS), [x, delta, weight]), expected
    )


def test_a_norm_of_what_comes_first() -> None:
    delta, weight = wanting(5, 8), wanting(8)
    expected = gradients((delta * 1, rms_norm(delta, (8,), weight, EPS)), [delta, weight])
    torch.testing.assert_close(
        gradients(add_norm(None, delta, weight, EPS), [delta, weight]), expected
    )


def plainly_turned(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None) -> Tensor:
    if norm is not None:
        x = rms_norm(x, (x.shape[-1],), norm, EPS)
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def test_queries_and_keys_turned_to_their_positions() -> None:
    positions = torch.tensor([0, 3, 1, 2, 7])
    cos, sin = torch.randn(2, 9, 8, dtype=torch.float64).unbind()
    for normed in (False, True):
        qkv, norms = wanting(5, (4 + 2 * 2) * 8), (wanting(8), wanting(8))
        heads = Heads(queries=4, keys=2, width=8, norms=norms if normed else None, eps=EPS)
        q, k, v = torch.split(qkv.view(5, 8, 8), [4, 2, 2], dim=1)
        at = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        plain = (
            plainly_turned(q, *at, norms[0] if normed else None),
            plainly_turned(k, *at, norms[1] if normed else None),
            v * 1,
        )
        inputs = [qkv, *norms] if normed else [qkv]
        said = turn(qkv, heads, (cos, sin), positions)
        torch.testing.assert_close(said, plain)
        torch.testing.assert_close(gradients(said, inputs), gradients(plain, inputs))


def test_a_gate() -> None:
    both = wanting(5, 12)
    first, second = both.chunk(2, dim=-1)
    torch.testing.assert_close(
        gradients((gate(both),), [both]), gradients((silu(first) * second,), [both])
    )


def test_projections_joined() -> None:
    x, parts = wanting(5, 8), [wanting(4, 8), wanting(2, 8), wanting(4), wanting(2)]
    weight, bias = torch.cat(parts[:2]).detach(), torch.cat(parts[2:]).detach()
    plain = torch.cat([linear(x, parts[0], parts[2]), linear(x, parts[1], parts[3])], dim=1)
    said = joined_linear(x, weight, bias, parts)
    torch.testing.assert_close(said, plain)
    torch.testing.assert_close(gradients((said,), [x, *parts]), gradients((plain,), [x, *parts]))


def test_scores_in_chunks_with_and_without_an_entropy_gradient() -> None:
    hidden, head, chosen = wanting(7, 8), wanting(11, 8), torch.tensor([0, 10, 3, 3, 5, 1, 2])
    logprobs = torch.log_softmax(linear(hidden, head) / 0.7, dim=-1)
    picked = logprobs.gather(1, chosen[:, None]).squeeze(1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    for both in (False, True):
        said = scores(hidden, head, chosen, temperature=0.7, chunk_size=3, entropy_gradient=both)
        torch.testing.assert_close(said, (picked, entropy))
        assert said[1].requires_grad is both
        n = 2 if both else 1
        torch.testing.assert_close(
            gradients(said[:n], [hidden, head]), gradients((picked, entropy)[:n], [hidden, head])
        )


def test_rows_that_several_take() -> None:
    x, rows = wanting(4, 2, 3), torch.tensor([0, 1, 0, 2, 0, 3])
    shared = SharedRows(
        rows_L=rows,
        starts_R=torch.tensor([0, 3, 4, 5, 6]),
        places_L=torch.tensor([0, 2, 4, 1, 3, 5]),
    )
    torch.testing.assert_close(
        gradients((take_shared(x, shared),), [x]), gradients((x[rows],), [x])
    )
