"""Reference of the Triton kernels in plain torch: expected values of the tests, and CPU path."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from skyfleet.models.fused.head_layout import HeadLayout


def matmul(
    x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    bias = None if bias_F is None else _upcast(bias_F)
    return linear(_upcast(x_TE), _upcast(weight_FE), bias).to(dtype)


def add_norm(
    x_TE: Tensor | None, delta_TE: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    sum_TE = _upcast(delta_TE) if x_TE is None else x_TE + delta_TE
    scale_T = torch.rsqrt(sum_TE.square().mean(dim=-1) + eps)
    out_TE = (sum_TE * scale_T[:, None] * weight_E).to(weight_E.dtype)
    return sum_TE, out_TE, scale_T


def add_norm_backward(
    dsum_TE: Tensor | None, dout_TE: Tensor, sum_TE: Tensor, scale_T: Tensor, weight_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    unit_TE = sum_TE * scale_T[:, None]
    dx_TE = _norm_backward(dout_TE * weight_E, unit_TE, scale_T[:, None])
    if dsum_TE is not None:
        dx_TE = dx_TE + dsum_TE
    return dx_TE, dx_TE.to(dout_TE.dtype), (dout_TE * unit_TE).sum(dim=0)


def apply_rope(
    qkv_TX: Tensor, heads: HeadLayout, cos_PD: Tensor, sin_PD: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _split(qkv_TX, heads)
    cos, sin = cos_PD[positions_T].unsqueeze(1), sin_PD[positions_T].unsqueeze(1)

    def rotate(x: Tensor, norm: int) -> Tensor:
        wide = _upcast(x)
        if heads.norms is not None:
            wide = wide * _scales(wide, heads.eps) * heads.norms[norm]
        return (wide * cos + wide.roll(heads.head_dim // 2, dims=-1) * sin).to(x.dtype)

    return rotate(q, 0), rotate(k, 1), v.clone()


def rope_backward(
    dq_THD: Tensor,
    dk_TKD: Tensor,
    dv_TKD: Tensor,
    qkv_TX: Tensor,
    heads: HeadLayout,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
) -> tuple[Tensor, Tensor | None]:
    q, k, _ = _split(qkv_TX, heads)
    cos, sin = cos_PD[positions_T].unsqueeze(1), sin_PD[positions_T].unsqueeze(1)
    dnorms: list[Tensor] = []

    def backward(dout: Tensor, x: Tensor, norm: int) -> Tensor:
        dx = _upcast(dout) * cos + (dout * sin).roll(heads.head_dim // 2, dims=-1)
        if heads.norms is None:
            return dx
        scale = _scales(_upcast(x), heads.eps)
        unit = x * scale
        dnorms.append((dx * unit).sum(dim=(0, 1)))
        return _norm_backward(dx * heads.norms[norm], unit, scale)

    dqkv_TXD = torch.cat([backward(dq_THD, q, 0), backward(dk_TKD, k, 1), _upcast(dv_TKD)], dim=1)
    return dqkv_TXD.flatten(1).to(qkv_TX.dtype), torch.stack(dnorms) if dnorms else None


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    gate_TF, up_TF = _upcast(gate_up_TF).chunk(2, dim=-1)
    return (gate_TF * torch.sigmoid(gate_TF) * up_TF).to(gate_up_TF.dtype)


def silu_mul_backward(dout_TF: Tensor, gate_up_TF: Tensor) -> Tensor:
    gate_TF, up_TF = _upcast(gate_up_TF).chunk(2, dim=-1)
    sigmoid_TF = torch.sigmoid(gate_TF)
    dgate_TF = dout_TF * up_TF * sigmoid_TF * (1 + gate_TF * (1 - sigmoid_TF))
    return torch.cat([dgate_TF, dout_TF * gate_TF * sigmoid_TF], dim=-1).to(gate_up_TF.dtype)


def token_logprobs(
    logits_CV: Tensor, chosen_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    scaled_CV = logits_CV / temperature
    lse_C = scaled_CV.logsumexp(dim=-1)
    logprobs_CV = scaled_CV - lse_C[:, None]
    entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1)
    return logprobs_CV.gather(1, chosen_C[:, None]).squeeze(1), entropy_C, lse_C


def token_logprobs_backward(
    logits_CV: Tensor,
    chosen_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    dlogprobs_C: Tensor,
    dentropy_C: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    logprobs_CV = logits_CV / temperature - lse_C[:, None]
    probs_CV = logprobs_CV.exp()
    dlogits_CV = -probs_CV * dlogprobs_C[:, None]
    dlogits_CV.scatter_add_(1, chosen_C[:, None], dlogprobs_C[:, None])
    if dentropy_C is not None:
        dlogits_CV -= dentropy_C[:, None] * probs_CV * (logprobs_CV + entropy_C[:, None])
    return (dlogits_CV / temperature).to(dtype)


def head_logprobs_backward(
    hidden_CE: Tensor,
    head_VE: Tensor,
    chosen_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    dlogprobs_C: Tensor,
    dentropy_C: Tensor | None,
    temperature: float,
) -> Tensor:
    logits_CV = matmul(hidden_CE, head_VE, dtype=_upcast(hidden_CE).dtype)
    given = (chosen_C, lse_C, entropy_C, dlogprobs_C, dentropy_C)
    return token_logprobs_backward(logits_CV, *given, temperature, hidden_CE.dtype)


def sum_shared_rows(taken_LX: Tensor, starts_R: Tensor, places_L: Tensor) -> Tensor:
    owners_L = torch.repeat_interleave(starts_R.diff())
    out = taken_LX.new_zeros(len(starts_R) - 1, *taken_LX.shape[1:])
    return out.index_add_(0, owners_L, taken_LX[places_L])


def _upcast(x: Tensor) -> Tensor:
    """To float32, or float64 if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _split(qkv_TX: Tensor, heads: HeadLayout) -> tuple[Tensor, Tensor, Tensor]:
    parts = qkv_TX.view(len(qkv_TX), -1, heads.head_dim)
    q, k, v = torch.split(parts, [heads.n_heads, heads.n_kv_heads, heads.n_kv_heads], dim=1)
    return q, k, v


def _scales(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _norm_backward(dunit: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    return (dunit - unit * (dunit * unit).mean(dim=-1, keepdim=True)) * scale
