"""Decoder: one forward pass for the Llama family, over the weights of a Hugging Face module.

On a CPU, engine and learner run this code on the same tensors. They differ only in the attention
function: over a KV cache, or over packed sequences. That is why their logprobs agree. On CUDA the
engine has its own pass (engines/cuda/cuda_graphs.py) over the same kernels and tensors, and tests
compare the bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from torch.utils.checkpoint import checkpoint

from skyfleet.errors import ModelError
from skyfleet.models.fused.flash_attention import HEAD_DIMS
from skyfleet.models.fused.layers import FusedLayer
from skyfleet.models.fused.ops import add_norm, matmul
from skyfleet.models.sequence_parallel import SequenceParallel
from skyfleet.models.tensor_parallel import TensorParallel

logger = logging.getLogger(__name__)

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class AttentionFn(Protocol):
    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Return the attention output of T tokens [T, H, D]: H query heads share K key-value
        heads."""
        ...


T = TypeVar("T")
LayerFn = Callable[..., Any]


class Decoder:
    has_plain_head = True
    """Logits are the plain matmul with `head_weight`."""
    sharded: Callable[[Callable[[], Any]], Any] | None = None
    """Of a decoder whose weights are divided among ranks: gathers them around a pass."""
    placement: tuple[torch.device, torch.dtype] | None = None
    """Of a sharded decoder: where and in which type a pass computes."""
    sequence: SequenceParallel | None = None
    tensor: TensorParallel | None = None

    def __init__(self, module: nn.Module, *, max_positions: int, fused: bool | None = None) -> None:
        """`fused` runs the layers on our own kernels.

        None does so on CUDA if they support the model.
        """
        name = type(module).__name__
        if name not in ARCHITECTURES:
            raise ModelError(
                f"{name} is not supported by this decoder; supported: {', '.join(ARCHITECTURES)}"
            )
        self.module = module
        config: Any = module.config
        _check_layers(config)
        body: Any = module.model
        self.n_layers: int = config.num_hidden_layers
        self.n_heads: int = config.num_attention_heads
        self.n_kv_heads: int = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None)
        self.head_dim: int = head_dim or config.hidden_size // self.n_heads
        self.vocab_size: int = config.vocab_size
        self.eps: float = config.rms_norm_eps
        self._body = body
        self._head: nn.Linear = module.lm_head  # type: ignore[assignment]
        self.layers: list[Any] = list(body.layers)
        self._has_qk_norm = hasattr(self.layers[0].self_attn, "q_norm")
        check_positions(config, max_positions)
        fits = self.device.type == "cuda" and self.head_dim in HEAD_DIMS
        is_fused = fits if fused is None else fused
        if self.device.type == "cuda" and not is_fused:
            logger.warning(
                "the fused kernels do not support head_dim=%s (only %s): engine and learner agree only "
                "up to rounding, and both are slower",
                self.head_dim,
                ", ".join(map(str, HEAD_DIMS)),
            )
        self.cos_PD, self.sin_PD = self._rotary_tables(
            max_positions, torch.float32 if is_fused else self.dtype
        )
        self._fused = self.fuse() if is_fused else None
        self.layer_fns: list[LayerFn] = [
            self.run_fused_layer if is_fused else self.run_layer for _ in self.layers
        ]
        """One per layer; a sharded decoder replaces them by modules that gather the weights."""

    def call(self, run: Callable[[], T]) -> T:
        """Run a pass that reads weights; everything that reads them is inside one."""
        if self.sharded is None:
            return run()
        result: T = self.sharded(run)
        return result

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    @property
    def device(self) -> torch.device:
        return self.placement[0] if self.placement else self._head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.placement[1] if self.placement else self._head.weight.dtype

    @property
    def embedding_weight(self) -> Tensor:
        weight: Tensor = self._body.embed_tokens.weight
        return weight

    @property
    def norm_weight(self) -> Tensor:
        weight: Tensor = self._body.norm.weight
        return weight

    @property
    def head_weight(self) -> Tensor:
        return self._head.weight

    def hidden(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attend: AttentionFn,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """Return the last layer's normed output [T, E], ready for `logits`.

        `recompute` keeps only the input of each layer (activation checkpointing).
        """
        n_rows = len(token_ids_T)
        if self.sequence is not None:
            token_ids_T = self.sequence.keep(token_ids_T)
            positions_T = self.sequence.keep(positions_T)
            attend = self.sequence.wrap(attend, n_rows)
        delta_TE = self._body.embed_tokens(token_ids_T)
        if self._fused is not None:
            x_TE = self._fused_hidden(delta_TE, positions_T, attend, recompute)
        else:
            x_TE = self._plain_hidden(delta_TE, positions_T, attend, recompute)
        return x_TE if self.sequence is None else self.sequence.gather(x_TE, n_rows)

    def _plain_hidden(
        self, x_TE: Tensor, positions_T: Tensor, attend: AttentionFn, recompute: bool
    ) -> Tensor:
        cos_T1D = self.cos_PD[positions_T].unsqueeze(1)
        sin_T1D = self.sin_PD[positions_T].unsqueeze(1)
        for index, run in enumerate(self.layer_fns):
            x_TE = run(index, x_TE, cos_T1D, sin_T1D, attend, recompute)
        return self._norm(x_TE, self.norm_weight)

    def run_layer(
        self,
        index: int,
        x_TE: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        attend: AttentionFn,
        recompute: bool,
    ) -> Tensor:
        if recompute:
            arguments = (index, x_TE, cos_T1D, sin_T1D, attend, False)
            out_TE: Tensor = checkpoint(self.run_layer, *arguments, use_reentrant=False)
            return out_TE
        layer = self.layers[index]
        x_TE = x_TE + self._attention(layer, index, x_TE, cos_T1D, sin_T1D, attend)
        return x_TE + self._mlp(layer, x_TE)

    def use_fused_layers(self) -> None:
        """Of a sharded decoder, which makes its fused layers anew in each pass."""
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # as in `fuse`
        if self._fused is None:
            self.cos_PD, self.sin_PD = self._rotary_tables(len(self.cos_PD), torch.float32)
            self._fused = []

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Float32 logits over the vocabulary [N, V]; with fused layers, without a gradient."""
        # Without rounding, as the learner's fused head on CUDA computes them.
        if self._fused is not None or (hidden_NE.is_cuda and not hidden_NE.requires_grad):
            return matmul(hidden_NE, self._head.weight, dtype=torch.float32)
        return linear(hidden_NE, self._head.weight).float()

    def fuse(self) -> list[FusedLayer]:
        """Return the layers on fused kernels; the module's weights become views of theirs."""
        # Partial sums in bfloat16 would depend on how a matmul is split.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        return [
            FusedLayer(
                layer,
                n_heads=self.n_heads,
                n_kv_heads=self.n_kv_heads,
                head_dim=self.head_dim,
                eps=self.eps,
            )
            for layer in self.layers
        ]

    def run_fused_layer(
        self, index: int, x_TE: Tensor | None, delta_TE: Tensor, *arguments: Any, recompute: bool
    ) -> tuple[Tensor, Tensor]:
        assert self._fused is not None
        layer = self._fused[index]
        return self.compute_fused(layer, index, x_TE, delta_TE, *arguments, recompute=recompute)

    def compute_fused(
        self,
        layer: FusedLayer,
        index: int,
        x_TE: Tensor | None,
        delta_TE: Tensor,
        positions_T: Tensor,
        attend: AttentionFn,
        *,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        arguments = ((self.cos_PD, self.sin_PD), positions_T, attend)
        if not recompute:
            return layer(index, x_TE, delta_TE, *arguments)
        # Keep the sum, which takes two thirds of the memory of both.
        sum_TE = delta_TE if x_TE is None else x_TE + delta_TE
        both: tuple[Tensor, Tensor] = checkpoint(
            layer, index, None, sum_TE, *arguments, save_memory=True, use_reentrant=False
        )
        return both

    def _fused_hidden(
        self, delta_TE: Tensor, positions_T: Tensor, attend: AttentionFn, recompute: bool
    ) -> Tensor:
        x_TE: Tensor | None = None
        for index, run in enumerate(self.layer_fns):
            x_TE, delta_TE = run(index, x_TE, delta_TE, positions_T, attend, recompute=recompute)
        return add_norm(x_TE, delta_TE, self.norm_weight, self.eps)[1]

    def _attention(
        self, layer: Any, index: int, x_TE: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn
    ) -> Tensor:
        block = layer.self_attn
        y_TE = self._spread(self._norm(x_TE, layer.input_layernorm.weight))
        heads = len(x_TE), -1, self.head_dim
        q_THD = _project(block.q_proj, y_TE).view(heads)
        k_TKD = _project(block.k_proj, y_TE).view(heads)
        v_TKD = _project(block.v_proj, y_TE).view(heads)
        if self._has_qk_norm:
            q_THD = self._norm(q_THD, block.q_norm.weight)
            k_TKD = self._norm(k_TKD, block.k_norm.weight)
        q_THD, k_TKD = _rotate(q_THD, cos, sin), _rotate(k_TKD, cos, sin)
        out_THD = attend(index, q_THD, k_TKD, v_TKD)
        return self._join(_project(block.o_proj, out_THD.reshape(len(x_TE), -1)))

    def _mlp(self, layer: Any, x_TE: Tensor) -> Tensor:
        block = layer.mlp
        y_TE = self._spread(self._norm(x_TE, layer.post_attention_layernorm.weight))
        gated = silu(_project(block.gate_proj, y_TE)) * _project(block.up_proj, y_TE)
        return self._join(_project(block.down_proj, gated))

    def _spread(self, x_TE: Tensor) -> Tensor:
        return x_TE if self.tensor is None else self.tensor.spread(x_TE)

    def _join(self, x_TE: Tensor) -> Tensor:
        return x_TE if self.tensor is None else self.tensor.join(x_TE)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _rotary_tables(self, max_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines from the module's own rotary embedding, including any scaling.

        The first half of the sines is negated for `_rotate`.
        """
        positions = torch.arange(max_positions, device=self.device).unsqueeze(0)
        with torch.no_grad():
            like = torch.zeros(1, device=self.device, dtype=dtype)
            cos, sin = self._body.rotary_emb(like, positions)
        sin[..., : self.head_dim // 2].neg_()
        return cos[0].contiguous(), sin[0].contiguous()


def check_positions(config: Any, max_positions: int) -> None:
    known = getattr(config, "max_position_embeddings", max_positions)
    if max_positions > known:
        raise ModelError(
            f"generator.max_input_length + max_generate_length={max_positions} tokens exceed the "
            f"model's context of {known} positions; lower them"
        )


def _check_layers(config: Any) -> None:
    """ModelError unless every layer has full attention and a SiLU gate."""
    if unsupported := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise ModelError(
            f"the model has layers of type {min(unsupported)}; only full_attention is supported"
        )
    if config.hidden_act != "silu":
        raise ModelError(f"the model has hidden_act={config.hidden_act!r}; only silu is supported")


def _project(layer: Any, x: Tensor) -> Tensor:
    # `forward` skips the hook lookup of `__call__`; a LoraLinear overrides `forward`.
    out: Tensor = layer.forward(x)
    return out


def _rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Apply RoPE; the sign of the first half is in the sines."""
    return x_THD * cos_T1D + x_THD.roll(x_THD.shape[-1] // 2, dims=-1) * sin_T1D
