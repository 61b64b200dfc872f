"""The Triton kernels' work in plain torch: what they must equal, and what runs without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyfleet.engines.cuda.prefix_groups import Kin
from skyfleet.models.fused.shapes import Heads
from skyfleet.models.fused.torch_kernels import turn


def place(
    qkv_NX: Tensor,
    keys: Tensor,
    values: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    lengths_N: Tensor,
    active_N: Tensor,
    table_NM: Tensor,
    *,
    eps: float,
) -> Tensor:
    page, n_kv, width = keys.shape[1:]
    n_heads = qkv_NX.shape[1] // width - 2 * n_kv
    heads = Heads(queries=n_heads, keys=n_kv, width=width, norms=norms, eps=eps)
    positions_N = lengths_N.long()
    q_NHD, k_NKD, v_NKD = turn(qkv_NX, heads, cos_PD, sin_PD, positions_N)
    pages_N = table_NM.long().gather(1, (positions_N // page).unsqueeze(1)).squeeze(1)
    cells_N = torch.where(active_N > 0, pages_N * page + positions_N % page, 0)
    keys.flatten(0, 1)[cells_N] = k_NKD
    values.flatten(0, 1)[cells_N] = v_NKD
    return q_NHD


def attend(
    q_NHD: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths_N: Tensor,
    active_N: Tensor,
    table_NM: Tensor,
    kin: Kin | None = None,
) -> Tensor:
    """Who is kin changes how much is read, and nothing else."""
    n, n_heads, width = q_NHD.shape
    page, n_kv, _ = keys.shape[1:]
    tokens_L = torch.arange(table_NM.shape[1] * page, device=q_NHD.device)
    cells_NL = table_NM.long()[:, tokens_L // page] * page + tokens_L % page
    k_NLKD, v_NLKD = keys.flatten(0, 1)[cells_NL], values.flatten(0, 1)[cells_NL]
    q_NKGD = q_NHD.reshape(n, n_kv, n_heads // n_kv, width).float()
    scores_NKGL = torch.einsum("nkgd,nlkd->nkgl", q_NKGD, k_NLKD.float()) * width**-0.5
    seen_NL = (tokens_L <= lengths_N.unsqueeze(1)) & (active_N > 0).unsqueeze(1)
    scores_NKGL = scores_NKGL.masked_fill(~seen_NL[:, None, None], -1e30)
    weights_NKGL = torch.softmax(scores_NKGL, dim=-1)
    out = torch.einsum("nkgl,nlkd->nkgd", weights_NKGL, v_NLKD.float())
    return out.reshape(n, n_heads, width).to(q_NHD.dtype)


def read_pages(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks_B4: Tensor,
    pages_P: Tensor,
    rows: int,
) -> Tensor:
    out_THD = torch.zeros_like(q_THD)
    page, n_kv, _ = keys.shape[1:]
    for first, n_rows, position, pages_at in blocks_B4.tolist():
        tokens_L = torch.arange(position + n_rows, device=q_THD.device)
        cells_L = pages_P[pages_at + tokens_L // page].long() * page + tokens_L % page
        k_KLD, v_KLD = (x.flatten(0, 1)[cells_L].transpose(0, 1) for x in (keys, values))
        seen_QL = tokens_L <= position + torch.arange(n_rows, device=q_THD.device)[:, None]
        here = slice(first, first + n_rows)
        out_HQD = scaled_dot_product_attention(
            q_THD[here].transpose(0, 1),
            k_KLD,
            v_KLD,
            attn_mask=seen_QL,
            enable_gqa=q_THD.shape[1] != n_kv,
        )
        out_THD[here] = out_HQD.transpose(0, 1)
    return out_THD


def speak(
    logits_MV: Tensor,
    slots_M: Tensor,
    *,
    factors_S: Tensor,
    uniforms_SW: Tensor,
    stops_SZ: Tensor,
    tokens_S: Tensor,
    lengths_S: Tensor,
    active_S: Tensor,
    said_S: Tensor,
    most_S: Tensor,
    step_1: Tensor,
    out_tokens_KS: Tensor,
    out_logprobs_KS: Tensor,
) -> None:
    at = slots_M.long()
    factors_M, said_M = factors_S[at], said_S[at].long()
    greedy_M = factors_M == 0
    scaled_MV = logits_MV.float() * torch.where(greedy_M, 1.0, factors_M).unsqueeze(1)
    logprobs_MV = torch.log_softmax(scaled_MV, dim=-1)
    reached_MV = logprobs_MV.exp().cumsum(dim=-1, dtype=torch.float64)
    uniforms_M1 = uniforms_SW[at].gather(1, said_M.unsqueeze(1))
    drawn_M = torch.searchsorted(reached_MV, uniforms_M1 * reached_MV[:, -1:], right=True)[:, 0]
    drawn_M = drawn_M.clamp(max=logits_MV.shape[1] - 1)
    tokens_M = torch.where(greedy_M, scaled_MV.argmax(dim=-1), drawn_M)
    chosen_M = logprobs_MV.gather(1, tokens_M.unsqueeze(1)).squeeze(1)
    active_M = active_S[at] > 0
    step = int(step_1)
    out_tokens_KS[step, at] = torch.where(active_M, tokens_M, -1).to(out_tokens_KS.dtype)
    out_logprobs_KS[step, at] = torch.where(greedy_M, 0.0, chosen_M)
    going = at[active_M]
    tokens_S[going] = tokens_M[active_M]
    lengths_S[going] += 1
    said_S[going] += 1
    stopped_M = (stops_SZ[at] == tokens_M.unsqueeze(1)).any(dim=1) | (said_S[at] >= most_S[at])
    active_S[at] = (active_M & ~stopped_M).to(active_S.dtype)
