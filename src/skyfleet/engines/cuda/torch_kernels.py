"""Reference of the Triton kernels in plain torch: expected values of the tests, and CPU path."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyfleet.engines.cuda.prefix_groups import PrefixGroups
from skyfleet.models.fused.head_layout import HeadLayout
from skyfleet.models.fused.torch_kernels import apply_rope


def write_kv(
    qkv_NX: Tensor,
    keys: Tensor,
    values: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    lengths_N: Tensor,
    active_N: Tensor,
    block_table_NM: Tensor,
    *,
    eps: float,
) -> Tensor:
    block_size, n_kv, head_dim = keys.shape[1:]
    n_heads = qkv_NX.shape[1] // head_dim - 2 * n_kv
    heads = HeadLayout(n_heads=n_heads, n_kv_heads=n_kv, head_dim=head_dim, norms=norms, eps=eps)
    positions_N = lengths_N.long()
    q_NHD, k_NKD, v_NKD = apply_rope(qkv_NX, heads, cos_PD, sin_PD, positions_N)
    blocks_N = block_table_NM.long().gather(1, (positions_N // block_size).unsqueeze(1)).squeeze(1)
    cells_N = torch.where(active_N > 0, blocks_N * block_size + positions_N % block_size, 0)
    keys.flatten(0, 1)[cells_N] = k_NKD
    values.flatten(0, 1)[cells_N] = v_NKD
    return q_NHD


def paged_decode_attention(
    q_NHD: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths_N: Tensor,
    active_N: Tensor,
    block_table_NM: Tensor,
    groups: PrefixGroups | None = None,
) -> Tensor:
    """Ignores `groups`, which change how much memory is read but not the result."""
    n, n_heads, head_dim = q_NHD.shape
    block_size, n_kv, _ = keys.shape[1:]
    tokens_L = torch.arange(block_table_NM.shape[1] * block_size, device=q_NHD.device)
    cells_NL = block_table_NM.long()[:, tokens_L // block_size] * block_size + tokens_L % block_size
    k_NLKD, v_NLKD = keys.flatten(0, 1)[cells_NL], values.flatten(0, 1)[cells_NL]
    q_NKGD = q_NHD.reshape(n, n_kv, n_heads // n_kv, head_dim).float()
    scores_NKGL = torch.einsum("nkgd,nlkd->nkgl", q_NKGD, k_NLKD.float()) * head_dim**-0.5
    visible_NL = (tokens_L <= lengths_N.unsqueeze(1)) & (active_N > 0).unsqueeze(1)
    scores_NKGL = scores_NKGL.masked_fill(~visible_NL[:, None, None], -1e30)
    weights_NKGL = torch.softmax(scores_NKGL, dim=-1)
    out = torch.einsum("nkgl,nlkd->nkgd", weights_NKGL, v_NLKD.float())
    return out.reshape(n, n_heads, head_dim).to(q_NHD.dtype)


def paged_prefill_attention(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles_B4: Tensor,
    blocks_P: Tensor,
    rows: int,
) -> Tensor:
    out_THD = torch.zeros_like(q_THD)
    block_size, n_kv, _ = keys.shape[1:]
    for first, n_rows, position, blocks_at in tiles_B4.tolist():
        tokens_L = torch.arange(position + n_rows, device=q_THD.device)
        cells_L = (
            blocks_P[blocks_at + tokens_L // block_size].long() * block_size + tokens_L % block_size
        )
        k_KLD, v_KLD = (x.flatten(0, 1)[cells_L].transpose(0, 1) for x in (keys, values))
        visible_QL = tokens_L <= position + torch.arange(n_rows, device=q_THD.device)[:, None]
        rows_here = slice(first, first + n_rows)
        out_HQD = scaled_dot_product_attention(
            q_THD[rows_here].transpose(0, 1),
            k_KLD,
            v_KLD,
            attn_mask=visible_QL,
            enable_gqa=q_THD.shape[1] != n_kv,
        )
        out_THD[rows_here] = out_HQD.transpose(0, 1)
    return out_THD


def sample_token(
    logits_MV: Tensor,
    slots_M: Tensor,
    *,
    inv_temperatures_S: Tensor,
    uniforms_SW: Tensor,
    stop_ids_SZ: Tensor,
    tokens_S: Tensor,
    lengths_S: Tensor,
    active_S: Tensor,
    n_generated_S: Tensor,
    max_new_tokens_S: Tensor,
    step_1: Tensor,
    out_tokens_KS: Tensor,
    out_logprobs_KS: Tensor,
) -> None:
    at = slots_M.long()
    inv_temperatures_M, n_generated_M = inv_temperatures_S[at], n_generated_S[at].long()
    greedy_M = inv_temperatures_M == 0
    scaled_MV = logits_MV.float() * torch.where(greedy_M, 1.0, inv_temperatures_M).unsqueeze(1)
    logprobs_MV = torch.log_softmax(scaled_MV, dim=-1)
    cumulative_MV = logprobs_MV.exp().cumsum(dim=-1, dtype=torch.float64)
    uniforms_M1 = uniforms_SW[at].gather(1, n_generated_M.unsqueeze(1))
    targets_M1 = uniforms_M1 * cumulative_MV[:, -1:]
    sampled_M = torch.searchsorted(cumulative_MV, targets_M1, right=True)[:, 0]
    sampled_M = sampled_M.clamp(max=logits_MV.shape[1] - 1)
    tokens_M = torch.where(greedy_M, scaled_MV.argmax(dim=-1), sampled_M)
    chosen_M = logprobs_MV.gather(1, tokens_M.unsqueeze(1)).squeeze(1)
    active_M = active_S[at] > 0
    step = int(step_1)
    out_tokens_KS[step, at] = torch.where(active_M, tokens_M, -1).to(out_tokens_KS.dtype)
    out_logprobs_KS[step, at] = torch.where(greedy_M, 0.0, chosen_M)
    continuing = at[active_M]
    tokens_S[continuing] = tokens_M[active_M]
    lengths_S[continuing] += 1
    n_generated_S[continuing] += 1
    stopped_M = (stop_ids_SZ[at] == tokens_M.unsqueeze(1)).any(dim=1)
    stopped_M |= n_generated_S[at] >= max_new_tokens_S[at]
    active_S[at] = (active_M & ~stopped_M).to(active_S.dtype)
