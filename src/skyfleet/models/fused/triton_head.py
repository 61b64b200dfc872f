"""Triton kernel of the head's gradient: logits are computed again where they are used, and not kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyfleet.models.fused.triton_products import STEP, blocks, card_of, product
from skyfleet.models.fused.triton_scores import score_back

_ROWS, _COLUMNS = 128, 128


@triton.jit(do_not_specialize=["n_rows"])
def _scores_back_kernel(
    hidden, head, chosen_ptr, total_ptr, entropy_ptr, dlogprobs_ptr, dentropy_ptr, out_ptr, factor,
    n_rows, vocabulary, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    ENTROPIC: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time share a block of the head.
    down = tl.cdiv(n_rows, ROWS)
    row_block, column_block = tl.program_id(0) % down, tl.program_id(0) // down
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, STEP):
        hidden_block = hidden.load([row_block * ROWS, start])
        head_block = head.load([column_block * COLUMNS, start])
        logits = tl.dot(hidden_block, head_block.T, logits)
    row = row_block * ROWS + tl.arange(0, ROWS)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    here = row < n_rows
    chosen = tl.load(chosen_ptr + row, mask=here, other=-1).to(tl.int32)
    total = tl.load(total_ptr + row, mask=here, other=0.0)
    dlogprob = tl.load(dlogprobs_ptr + row, mask=here, other=0.0) * factor
    logprob = logits * factor - total[:, None]
    share = tl.exp(logprob)
    dlogits = tl.where(column[None, :] == chosen[:, None], 1.0 - share, -share) * dlogprob[:, None]
    if ENTROPIC:
        entropy = tl.load(entropy_ptr + row, mask=here, other=0.0)
        dentropy = tl.load(dentropy_ptr + row, mask=here, other=0.0) * factor
        dlogits -= dentropy[:, None] * share * (logprob + entropy[:, None])
    out_at = out_ptr + row.to(tl.int64)[:, None] * vocabulary + column[None, :]
    inside = here[:, None] & (column < vocabulary)[None, :]
    tl.store(out_at, dlogits.to(out_ptr.dtype.element_ty), mask=inside)


def scores_back(
    hidden_CE: Tensor, head_VE: Tensor, chosen_C: Tensor, total_C: Tensor, entropy_C: Tensor,
    dlogprobs_C: Tensor, dentropy_C: Tensor | None, temperature: float,
) -> Tensor:  # fmt: skip
    """The logits' gradient in the type of `hidden`, of which float32 takes the way over memory."""
    given = (chosen_C, total_C, entropy_C, dlogprobs_C, dentropy_C, temperature, hidden_CE.dtype)
    (n_rows, depth), vocabulary = hidden_CE.shape, len(head_VE)
    # The copy engine's blocks are what makes it worth while.
    if hidden_CE.dtype == torch.float32 or n_rows == 0 or not card_of(hidden_CE.device).fetches:
        return score_back(product(hidden_CE, head_VE, dtype=torch.float32), *given)
    dlogits_CV = hidden_CE.new_empty(n_rows, vocabulary)
    grid = (triton.cdiv(n_rows, _ROWS) * triton.cdiv(vocabulary, _COLUMNS),)
    _scores_back_kernel[grid](
        blocks(hidden_CE, _ROWS), blocks(head_VE, _COLUMNS), chosen_C, total_C, entropy_C,
        dlogprobs_C, dlogprobs_C if dentropy_C is None else dentropy_C, dlogits_CV,
        1.0 / temperature, n_rows, vocabulary, depth,
        ROWS=_ROWS, COLUMNS=_COLUMNS, STEP=STEP, ENTROPIC=dentropy_C is not None,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return dlogits_CV
