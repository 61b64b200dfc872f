"""HFDecoder: any causal language model of transformers, run by its own forward pass.

Only attention is replaced: layers call an `AttentionFn` through transformers' attention interface,
so engine and learner still run the same code on the same tensors. The constructor verifies that
this is right for the model: two packed sequences must get the logits that transformers computes for
each alone.
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from skyfleet.errors import ModelError
from skyfleet.models.decoder import ARCHITECTURES, AttentionFn, Decoder, check_positions
from skyfleet.models.packed import PackedAttention

logger = logging.getLogger(__name__)

_INTERFACE = "skyfleet"
_PROBE = ((1, 2, 3, 5, 7, 4), (1, 2, 6, 1, 5, 3, 2, 4, 7))
"""Token ids that every vocabulary has; the second sequence does not continue the first."""
_FLOAT32_TOLERANCE, _LOW_PRECISION_TOLERANCE = 1e-3, 5e-2
"""Largest difference between two computations of the same logits, relative to their norm."""


def make_decoder(module: nn.Module, *, max_positions: int) -> Decoder:
    """Return the fastest decoder that supports `module`."""
    known = type(module).__name__ in ARCHITECTURES
    return (Decoder if known else HFDecoder)(module, max_positions=max_positions)


class HFDecoder(Decoder):
    has_plain_head = False

    def __init__(self, module: Any, *, max_positions: int) -> None:
        self.module = module
        self._model: Any = module
        self._head = self._model.get_output_embeddings()
        config: Any = module.config
        name = type(module).__name__
        check_positions(config, max_positions)
        _check_attention(name, config, max_positions)
        module.eval()  # the engine samples without dropout
        self.n_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self._layers: list[nn.Module] = [
            m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)
        ]
        if self._layers:
            self._model.gradient_checkpointing_enable()
        self._top: Any = copy.copy(module)
        self._top._modules = {**self._top._modules, self._model.base_model_prefix: _PassThrough()}
        try:
            probe = self._verify(name)
        except ModelError:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise ModelError(f"{name} is not supported: {reason}; {_REMEDY}") from error
        self.n_heads, self.n_kv_heads, self.head_dim = probe.shape
        _warn_slow(name)

    @property
    def embedding_weight(self) -> Tensor:
        weight: Tensor = self._model.get_input_embeddings().weight
        return weight

    def hidden(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attend: AttentionFn,
        *,
        recompute: bool = False,
    ) -> Tensor:
        for layer in self._layers:
            layer.training = recompute  # transformers checkpoints layers in training mode only
        n_rows = len(token_ids_T)
        if self.sequence is not None:
            token_ids_T = self.sequence.keep(token_ids_T)
            positions_T = self.sequence.keep(positions_T)
            attend = self.sequence.wrap(attend, n_rows)
        out = self._model.base_model(
            input_ids=token_ids_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            attend=attend,
        )
        hidden_TE: Tensor = out.last_hidden_state[0]
        return hidden_TE if self.sequence is None else self.sequence.gather(hidden_TE, n_rows)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers, each of which transformers calls as a module."""
        return self._layers

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Logits of the model's own head, including any scaling or capping."""
        logits_NV: Tensor = self._top(inputs_embeds=hidden_NE.unsqueeze(0)).logits[0]
        return logits_NV.float()

    @torch.no_grad()
    def _verify(self, name: str) -> _Probe:
        """ModelError unless packed attention gives the logits that transformers computes itself."""
        self._model.set_attn_implementation("eager")
        expected = [
            self._model(torch.tensor([ids], device=self.device), use_cache=False).logits[0].float()
            for ids in _PROBE
        ]
        self._model.set_attn_implementation(_INTERFACE)
        attend = PackedAttention(_PROBE, self.device)
        probe = _Probe(attend)
        got_TV = self.logits(self.hidden(attend.token_ids_T, attend.positions_T, probe))
        if sorted(probe.layers) != list(range(self.n_layers)):
            raise ModelError(f"{name} has layers without attention; {_REMEDY}")
        is_float32 = self.dtype == torch.float32
        tolerance = _FLOAT32_TOLERANCE if is_float32 else _LOW_PRECISION_TOLERANCE
        for row_L, expected_LV in zip(attend.rows_BL, expected, strict=True):
            gap_LV = got_TV[row_L[: len(expected_LV)]] - expected_LV
            if not float(gap_LV.norm() / expected_LV.norm()) <= tolerance:
                raise ModelError(
                    f"{name} uses an unsupported kind of attention: its packed logits differ from "
                    f"those of transformers; {_REMEDY}"
                )
        return probe


_REMEDY = f"choose a model with full causal attention, such as {', '.join(ARCHITECTURES)}"


@dataclass
class _Hidden(BaseModelOutputWithPastAndCrossAttentions):
    router_logits: Any = None
    """The head of a mixture-of-experts model reads it."""


class _PassThrough(nn.Module):
    """Replaces the body of a model whose last hidden states are already computed."""

    def forward(self, *_: Any, inputs_embeds: Any = None, **__: Any) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)


class _Probe:
    """An attention function that records which layers call it and with which shapes."""

    def __init__(self, attend: AttentionFn) -> None:
        self._attend = attend
        self.layers: list[int] = []
        self.shape = (0, 0, 0)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        shape = (q_THD.shape[1], k_TKD.shape[1], q_THD.shape[2])
        if k_TKD.shape != v_TKD.shape or (self.layers and shape != self.shape):
            raise ModelError(f"layers have keys and values of different widths; {_REMEDY}")
        self.layers.append(layer)
        self.shape = shape
        return self._attend(layer, q_THD, k_TKD, v_TKD)


def _attention(
    layer: Any,
    q_1HTD: Tensor,
    k_1KTD: Tensor,
    v_1KTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    attend: AttentionFn,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention interface of transformers: [1, heads, T, D] in, [1, T, heads, D] out."""
    # With small weights these change too little for `_verify` to notice.
    if attention_mask is not None or any(more.get(n) is not None for n in ("softcap", "s_aux")):
        raise ModelError(f"{type(layer).__name__} caps, shifts or masks its scores; {_REMEDY}")
    # `AttentionFn` divides by sqrt(head_dim); some models use another scale.
    factor = 1.0 if scaling is None else scaling * math.sqrt(q_1HTD.shape[-1])
    # Some are slices of one projection; kernels need them contiguous.
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).contiguous() for x in (q_1HTD, k_1KTD, v_1KTD))
    q_THD = q_THD if math.isclose(factor, 1.0) else q_THD * factor
    return attend(layer.layer_idx, q_THD, k_TKD, v_TKD).unsqueeze(0), None


AttentionInterface.register(_INTERFACE, _attention)


def _check_attention(name: str, config: Any, max_positions: int) -> None:
    """ModelError for attention that the short probe sequences would not reveal."""
    supported = {"full_attention", "sliding_attention"}
    if unsupported := set(getattr(config, "layer_types", None) or ()) - supported:
        raise ModelError(f"{name} has layers of type {min(unsupported)}; {_REMEDY}")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_positions:
        raise ModelError(
            f"{name} has a sliding window of {window} tokens, shorter than "
            f"generator.max_input_length + max_generate_length={max_positions}; lower them to {window}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if max_positions > original:
        raise ModelError(
            f"{name} changes its RoPE beyond {original} tokens (rope_type={rope['rope_type']!r}), and "
            f"generator.max_input_length + max_generate_length={max_positions}; lower them to "
            f"{original}"
        )


@cache
def _warn_slow(name: str) -> None:
    logger.warning(
        "%s runs with transformers' own forward pass, slower than %s",
        name,
        ", ".join(ARCHITECTURES),
    )
