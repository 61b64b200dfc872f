"""Triton kernels of the head and of shared rows: logprobs without a softmax kept, sums in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tempered_mass(base, factor, vocabulary, BLOCK: tl.constexpr):
    """Of exp(logits * factor): the highest exponent, the mass above it, and the mass times exponents.

    Engine and learner both ask here, so that a logprob is the same bits from either.
    """
    at = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + at < vocabulary
        x = tl.load(base + start + at, mask=inside, other=-1e30).to(tl.float32) * factor
        x = tl.maximum(x, -1e30)  # what is impossible weighs nothing, and stays finite
        higher = tl.maximum(highest, x)
        fade, mass = tl.exp(highest - higher), tl.where(inside, tl.exp(x - higher), 0.0)
        total = total * fade + mass
        weighted = weighted * fade + mass * x
        highest = higher
    top = tl.max(highest, axis=0)
    fade = tl.exp(highest - top)
    return top, tl.sum(total * fade, axis=0), tl.sum(weighted * fade, axis=0)


@triton.jit
def tempered_logprob(base, token, factor, top, mass):
    return tl.load(base + token).to(tl.float32) * factor - (top + tl.log(mass))


UNFUSED = {"enable_fp_fusion": False}
"""Whether a product is rounded before it is added must not be each kernel's own choice."""


@triton.jit
def _score_kernel(
    logits_ptr, chosen_ptr, logprobs_ptr, entropy_ptr, total_ptr, factor, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * vocabulary
    top, mass, weighted = tempered_mass(base, factor, vocabulary, BLOCK)
    logarithm = top + tl.log(mass)
    logprob = tempered_logprob(base, tl.load(chosen_ptr + row), factor, top, mass)
    tl.store(logprobs_ptr + row, logprob)
    tl.store(entropy_ptr + row, logarithm - weighted / mass)
    tl.store(total_ptr + row, logarithm)


def score(logits_CV: Tensor, chosen_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of the chosen, entropy, and the logarithm of the total mass; all tempered."""
    n, vocabulary = logits_CV.shape
    logprobs_C, entropy_C, total_C = torch.empty(
        3, n, dtype=torch.float32, device=logits_CV.device
    ).unbind()
    _score_kernel[(n,)](
        logits_CV, chosen_C, logprobs_C, entropy_C, total_C, 1.0 / temperature, vocabulary,
        BLOCK=4096, num_warps=8, **UNFUSED,
    )  # fmt: skip
    return logprobs_C, entropy_C, total_C


@triton.jit
def _score_back_kernel(
    logits_ptr, chosen_ptr, total_ptr, entropy_ptr, dlogprobs_ptr, dentropy_ptr, dlogits_ptr,
    factor, vocabulary, BLOCK: tl.constexpr, ENTROPIC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    logprob = tl.load(logits_ptr + row * vocabulary + at, mask=inside, other=-1e30) * factor
    logprob -= tl.load(total_ptr + row)
    share = tl.exp(logprob)
    is_chosen = at == tl.load(chosen_ptr + row)
    dlogits = tl.load(dlogprobs_ptr + row) * (tl.where(is_chosen, 1.0, 0.0) - share)
    if ENTROPIC:
        entropy = tl.load(entropy_ptr + row)
        dlogits -= tl.load(dentropy_ptr + row) * share * (logprob + entropy)
    dlogits = (dlogits * factor).to(dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + row * vocabulary + at, dlogits, mask=inside)


def score_back(
    logits_CV: Tensor, chosen_C: Tensor, total_C: Tensor, entropy_C: Tensor,
    dlogprobs_C: Tensor, dentropy_C: Tensor | None, temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    n, vocabulary = logits_CV.shape
    dlogits_CV = torch.empty(n, vocabulary, dtype=dtype, device=logits_CV.device)
    block = 4096
    _score_back_kernel[(n, triton.cdiv(vocabulary, block))](
        logits_CV, chosen_C, total_C, entropy_C, dlogprobs_C,
        dlogprobs_C if dentropy_C is None else dentropy_C, dlogits_CV,
        1.0 / temperature, vocabulary, BLOCK=block, ENTROPIC=dentropy_C is not None, num_warps=8,
    )  # fmt: skip
    return dlogits_CV


@triton.jit
def _fold_kernel(
    taken_ptr, starts_ptr, users_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        user = tl.load(users_ptr + index).to(tl.int64)
        total += tl.load(taken_ptr + user * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def fold(taken_LX: Tensor, starts_R: Tensor, users_L: Tensor) -> Tensor:
    """Row r is the sum of `taken[users[starts[r]:starts[r+1]]]`, always in that order."""
    n, width = len(starts_R) - 1, taken_LX[0].numel()
    out = taken_LX.new_empty(n, *taken_LX.shape[1:])
    _fold_kernel[(n,)](
        taken_LX, starts_R, users_L, out, WIDTH=width, BLOCK=triton.next_power_of_2(width)
    )
    return out
