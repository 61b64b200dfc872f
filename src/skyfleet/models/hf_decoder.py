"""ForeignDecoder: any causal language model of transformers, run by its own forward pass.

Only attention is ours: layers call `AttentionFn` through transformers' attention interface, so engine
and learner still run the same code on the same tensors. Whether that is right for a model is proven
when it is built: two packed sequences must get the logits that transformers gives to each alone.
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
"""Token ids that every vocabulary has; the second sequence is not the first's continuation."""
_FLOAT32_GAP, _COARSE_GAP = 1e-3, 5e-2
"""How far two ways of computing the same logits lie apart at most, relative to their norm."""


def make_decoder(module: nn.Module, *, max_positions: int) -> Decoder:
    """The decoder that runs `module` fastest."""
    known = type(module).__name__ in ARCHITECTURES
    return (Decoder if known else HFDecoder)(module, max_positions=max_positions)


class HFDecoder(Decoder):
    has_plain_head = False

    def __init__(self, module: Any, *, max_positions: int) -> None:
        self.module = module
        self._whole: Any = module
        self._head = self._whole.get_output_embeddings()
        config: Any = module.config
        name = type(module).__name__
        check_positions(config, max_positions)
        _check_attention(name, config, max_positions)
        module.eval()  # the engine knows no dropout
        self.n_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self._layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
        if self._layers:
            self._whole.gradient_checkpointing_enable()
        self._top: Any = copy.copy(module)
        self._top._modules = {**self._top._modules, self._whole.base_model_prefix: _Given()}
        try:
            probe = self._prove(name)
        except ModelError:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise ModelError(f"{name} does not run here: {reason}; {_WAY_OUT}") from error
        self.n_heads, self.n_kv_heads, self.head_dim = probe.shape
        _warn(name)

    @property
    def embedding_weight(self) -> Tensor:
        weight: Tensor = self._whole.get_input_embeddings().weight
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
            layer.training = recompute  # what transformers asks before it recomputes
        out = self._whole.base_model(
            input_ids=token_ids_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            attend=attend,
        )
        hidden_TE: Tensor = out.last_hidden_state[0]
        return hidden_TE

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """By the model's own head, with whatever it does to its scores."""
        logits_NV: Tensor = self._top(inputs_embeds=hidden_NE.unsqueeze(0)).logits[0]
        return logits_NV.float()

    @torch.no_grad()
    def _prove(self, name: str) -> _Probe:
        self._whole.set_attn_implementation("eager")
        expected = [
            self._whole(torch.tensor([ids], device=self.device), use_cache=False).logits[0].float()
            for ids in _PROBE
        ]
        self._whole.set_attn_implementation(_INTERFACE)
        attend = PackedAttention(_PROBE, self.device)
        probe = _Probe(attend)
        got_TV = self.logits(self.hidden(attend.token_ids_T, attend.positions_T, probe))
        if sorted(probe.layers) != list(range(self.n_layers)):
            raise ModelError(f"{name} has layers that do not attend; {_WAY_OUT}")
        limit = _FLOAT32_GAP if self.dtype == torch.float32 else _COARSE_GAP
        for row_L, expected_LV in zip(attend.rows_BL, expected, strict=True):
            gap_LV = got_TV[row_L[: len(expected_LV)]] - expected_LV
            if not float(gap_LV.norm() / expected_LV.norm()) <= limit:
                raise ModelError(
                    f"{name} attends in a way that is not understood here: its logits are not "
                    f"those of transformers; {_WAY_OUT}"
                )
        return probe


_WAY_OUT = (
    f"choose a model that attends to all that came before, such as {', '.join(ARCHITECTURES)}"
)


@dataclass
class _Hidden(BaseModelOutputWithPastAndCrossAttentions):
    router_logits: Any = None
    """A head over experts asks for it."""


class _Given(nn.Module):
    """Stands in for the body of a model whose last hidden states are there already."""

    def forward(self, *_: Any, inputs_embeds: Any = None, **__: Any) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)


class _Probe:
    """Attends, and notes what the layers look like."""

    def __init__(self, attend: AttentionFn) -> None:
        self._attend = attend
        self.layers: list[int] = []
        self.shape = (0, 0, 0)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        shape = (q_THD.shape[1], k_TKD.shape[1], q_THD.shape[2])
        if k_TKD.shape != v_TKD.shape or (self.layers and shape != self.shape):
            raise ModelError(f"layers have keys and values of several widths; {_WAY_OUT}")
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
    """What transformers calls in each layer: [1, heads, T, D] in, [1, T, heads, D] out."""
    # With small weights these change so little that the proof would not notice.
    if attention_mask is not None or any(more.get(n) is not None for n in ("softcap", "s_aux")):
        raise ModelError(f"{type(layer).__name__} caps, shifts or masks its scores; {_WAY_OUT}")
    # `AttentionFn` divides by the root of the width; some models want another number.
    factor = 1.0 if scaling is None else scaling * math.sqrt(q_1HTD.shape[-1])
    # Some are slices of one projection; kernels want them whole.
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).contiguous() for x in (q_1HTD, k_1KTD, v_1KTD))
    q_THD = q_THD if math.isclose(factor, 1.0) else q_THD * factor
    return attend(layer.layer_idx, q_THD, k_TKD, v_TKD).unsqueeze(0), None


AttentionInterface.register(_INTERFACE, _attention)


def _check_attention(name: str, config: Any, max_positions: int) -> None:
    """What a short probe would not notice."""
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        raise ModelError(f"{name} has layers of {min(odd)}; {_WAY_OUT}")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_positions:
        raise ModelError(
            f"{name} has a sliding window of {window} tokens and an episode may reach "
            f"{max_positions}; bound generator.max_input_length + max_generate_length by {window}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if max_positions > original:
        raise ModelError(
            f"{name} turns its positions otherwise past {original} tokens "
            f"(rope_type={rope['rope_type']!r}) and an episode may reach {max_positions}; "
            f"bound generator.max_input_length + max_generate_length by {original}"
        )


@cache
def _warn(name: str) -> None:
    logger.warning(
        "%s runs by transformers' own forward pass, slower than %s", name, ", ".join(ARCHITECTURES)
    )
