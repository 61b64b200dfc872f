"""Triton kernels of the LM head: token logprobs, entropy and their gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyfleet.models.fused.triton_matmul import DEPTH_BLOCK, device_traits, matmul, tma_blocks

_ROWS, _COLUMNS = 128, 128


@triton.jit
def softmax_stats(base, factor, vocabulary, BLOCK: tl.constexpr):
    """Return the maximum of x = logits * factor, the sum of exp(x - max), and the same sum weighted
    by x.

    Engine and learner both use this function, so both compute a logprob with the same bits.
    """
    at = tl.arange(0, BLOCK)
    row_max = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + at < vocabulary
        x = tl.load(base + start + at, mask=inside, other=-1e30).to(tl.float32) * factor
        x = tl.maximum(x, -1e30)  # keeps masked tokens finite; their probability is 0
        new_max = tl.maximum(row_max, x)
        rescale, mass = tl.exp(row_max - new_max), tl.where(inside, tl.exp(x - new_max), 0.0)
        total = total * rescale + mass
        weighted = weighted * rescale + mass * x
        row_max = new_max
    top = tl.max(row_max, axis=0)
    rescale = tl.exp(row_max - top)
    return top, tl.sum(total * rescale, axis=0), tl.sum(weighted * rescale, axis=0)


@triton.jit
def token_logprob(base, token, factor, top, mass):
    return tl.load(base + token).to(tl.float32) * factor - (top + tl.log(mass))


NO_FP_FUSION = {"enable_fp_fusion": False}
"""Kernels must not differ in whether the compiler fuses a multiplication and an addition."""


@triton.jit
def _logprobs_kernel(
    logits_ptr, chosen_ptr, logprobs_ptr, entropy_ptr, lse_ptr, factor, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * vocabulary
    top, mass, weighted = softmax_stats(base, factor, vocabulary, BLOCK)
    lse = top + tl.log(mass)
    logprob = token_logprob(base, tl.load(chosen_ptr + row), factor, top, mass)
    tl.store(logprobs_ptr + row, logprob)
    tl.store(entropy_ptr + row, lse - weighted / mass)
    tl.store(lse_ptr + row, lse)


def token_logprobs(
    logits_CV: Tensor, chosen_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of the chosen token, entropy, and log-sum-exp of logits / temperature."""
    n, vocabulary = logits_CV.shape
    logprobs_C, entropy_C, lse_C = torch.empty(
        3, n, dtype=torch.float32, device=logits_CV.device
    ).unbind()
    _logprobs_kernel[(n,)](
        logits_CV, chosen_C, logprobs_C, entropy_C, lse_C, 1.0 / temperature, vocabulary,
        BLOCK=4096, num_warps=8, **NO_FP_FUSION,
    )  # fmt: skip
    return logprobs_C, entropy_C, lse_C


@triton.jit
def _logprobs_backward_kernel(
    logits_ptr, chosen_ptr, lse_ptr, entropy_ptr, dlogprobs_ptr, dentropy_ptr, dlogits_ptr,
    factor, vocabulary, BLOCK: tl.constexpr, WITH_ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    logprob = tl.load(logits_ptr + row * vocabulary + at, mask=inside, other=-1e30) * factor
    logprob -= tl.load(lse_ptr + row)
    prob = tl.exp(logprob)
    is_chosen = at == tl.load(chosen_ptr + row)
    dlogits = tl.load(dlogprobs_ptr + row) * (tl.where(is_chosen, 1.0, 0.0) - prob)
    if WITH_ENTROPY:
        entropy = tl.load(entropy_ptr + row)
        dlogits -= tl.load(dentropy_ptr + row) * prob * (logprob + entropy)
    dlogits = (dlogits * factor).to(dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + row * vocabulary + at, dlogits, mask=inside)


def token_logprobs_backward(
    logits_CV: Tensor, chosen_C: Tensor, lse_C: Tensor, entropy_C: Tensor,
    dlogprobs_C: Tensor, dentropy_C: Tensor | None, temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    n, vocabulary = logits_CV.shape
    dlogits_CV = torch.empty(n, vocabulary, dtype=dtype, device=logits_CV.device)
    block = 4096
    _logprobs_backward_kernel[(n, triton.cdiv(vocabulary, block))](
        logits_CV, chosen_C, lse_C, entropy_C, dlogprobs_C,
        dlogprobs_C if dentropy_C is None else dentropy_C, dlogits_CV,
        1.0 / temperature, vocabulary, BLOCK=block, WITH_ENTROPY=dentropy_C is not None,
        num_warps=8,
    )  # fmt: skip
    return dlogits_CV


@triton.jit(do_not_specialize=["n_rows"])
def _head_logprobs_backward_kernel(
    hidden, head, chosen_ptr, lse_ptr, entropy_ptr, dlogprobs_ptr, dentropy_ptr, out_ptr, factor,
    n_rows, vocabulary, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr, WITH_ENTROPY: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time share a block of the head.
    n_row_blocks = tl.cdiv(n_rows, ROWS)
    row_block, column_block = tl.program_id(0) % n_row_blocks, tl.program_id(0) // n_row_blocks
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH_BLOCK):
        hidden_block = hidden.load([row_block * ROWS, start])
        head_block = head.load([column_block * COLUMNS, start])
        logits = tl.dot(hidden_block, head_block.T, logits)
    row = row_block * ROWS + tl.arange(0, ROWS)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    valid = row < n_rows
    chosen = tl.load(chosen_ptr + row, mask=valid, other=-1).to(tl.int32)
    lse = tl.load(lse_ptr + row, mask=valid, other=0.0)
    dlogprob = tl.load(dlogprobs_ptr + row, mask=valid, other=0.0) * factor
    logprob = logits * factor - lse[:, None]
    prob = tl.exp(logprob)
    dlogits = tl.where(column[None, :] == chosen[:, None], 1.0 - prob, -prob) * dlogprob[:, None]
    if WITH_ENTROPY:
        entropy = tl.load(entropy_ptr + row, mask=valid, other=0.0)
        dentropy = tl.load(dentropy_ptr + row, mask=valid, other=0.0) * factor
        dlogits -= dentropy[:, None] * prob * (logprob + entropy[:, None])
    out_at = out_ptr + row.to(tl.int64)[:, None] * vocabulary + column[None, :]
    inside = valid[:, None] & (column < vocabulary)[None, :]
    tl.store(out_at, dlogits.to(out_ptr.dtype.element_ty), mask=inside)


def head_logprobs_backward(
    hidden_CE: Tensor, head_VE: Tensor, chosen_C: Tensor, lse_C: Tensor, entropy_C: Tensor,
    dlogprobs_C: Tensor, dentropy_C: Tensor | None, temperature: float,
) -> Tensor:  # fmt: skip
    """Gradient of the logits, in the dtype of `hidden`.

    The kernel recomputes the logits in place.
    """
    given = (chosen_C, lse_C, entropy_C, dlogprobs_C, dentropy_C, temperature, hidden_CE.dtype)
    (n_rows, depth), vocabulary = hidden_CE.shape, len(head_VE)
    # Recomputing pays only with TMA loads; otherwise the logits are stored in memory.
    has_tma = device_traits(hidden_CE.device).has_tma
    if hidden_CE.dtype == torch.float32 or n_rows == 0 or not has_tma:
        return token_logprobs_backward(matmul(hidden_CE, head_VE, dtype=torch.float32), *given)
    dlogits_CV = hidden_CE.new_empty(n_rows, vocabulary)
    grid = (triton.cdiv(n_rows, _ROWS) * triton.cdiv(vocabulary, _COLUMNS),)
    _head_logprobs_backward_kernel[grid](
        tma_blocks(hidden_CE, _ROWS), tma_blocks(head_VE, _COLUMNS), chosen_C, lse_C, entropy_C,
        dlogprobs_C, dlogprobs_C if dentropy_C is None else dentropy_C, dlogits_CV,
        1.0 / temperature, n_rows, vocabulary, depth,
        ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH_BLOCK=DEPTH_BLOCK, WITH_ENTROPY=dentropy_C is not None,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return dlogits_CV
