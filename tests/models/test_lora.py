"""Adapters are merged: the weights run as they are, and only A and B learn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.fakes.small_models import DIMENSIONS, VOCABULARY, logits_of, seeded, small_decoder
from tests.models.test_hf_decoder import EXPERTS, build_module
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import GemmaConfig, GemmaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from skyfleet.config.policy import Lora
from skyfleet.errors import ModelError
from skyfleet.models.decoder import Decoder
from skyfleet.models.fused.layers import FusedLinear
from skyfleet.models.hf_decoder import make_decoder
from skyfleet.models.lora import adapters, add_adapters, merge, rounding_offsets, strip_adapters
from skyfleet.models.packed import PackedAttention

LORA = Lora(rank=4, alpha=8)
TOKENS = [(7 * i) % VOCABULARY for i in range(20)]


def adapted(settings: Lora = LORA, *, seed: int = 0, **changes: Any) -> Decoder:
    decoder = small_decoder(**changes)
    add_adapters(decoder.module, settings, seed=seed)
    return decoder


@torch.no_grad()
def stir(module: nn.Module) -> None:
    """A and B somewhere, as training leaves them; merged."""
    rng = torch.Generator().manual_seed(3)
    for layer in adapters(module).values():
        for parameter in (layer.lora_A, layer.lora_B):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=rng))
    merge(module)


def test_a_new_adapter_does_not_change_the_output() -> None:
    plain, decoder = small_decoder(), adapted()
    merge(decoder.module)
    with torch.no_grad():
        assert torch.equal(logits_of(plain, TOKENS), logits_of(decoder, TOKENS))


def test_the_weight_is_the_base_and_scale_times_b_times_a() -> None:
    decoder = adapted()
    stir(decoder.module)
    layers = adapters(decoder.module)
    assert len(layers) == 2 * 7  # q, k, v, o, gate, up, down in each layer
    for layer in layers.values():
        product = layer.lora_B @ layer.lora_A
        torch.testing.assert_close(layer.weight, layer.base + 2.0 * product, atol=1e-6, rtol=0)


def explicit_gradients(decoder: Decoder) -> dict[str, Tensor]:
    """By autograd through base + scale·B·A, written out."""
    module = decoder.module
    taken: list[Tensor] = []

    class Explicit:
        def __init__(self, layer: Any) -> None:
            self._layer = layer

        def forward(self, x: Tensor) -> Tensor:
            layer = self._layer
            return linear(x, layer.base + layer.scale * layer.lora_B @ layer.lora_A, layer.bias)

    written = copy.deepcopy(module)
    named = adapters(written)
    for name, layer in named.items():
        parent, _, leaf = name.rpartition(".")
        holder = written.get_submodule(parent)
        delattr(holder, leaf)
        object.__setattr__(holder, leaf, Explicit(layer))
    out = logits_of(Decoder(written, max_positions=64), TOKENS)
    parts = {
        f"{name}.{part}": getattr(layer, part)
        for name, layer in named.items()
        for part in ("lora_A", "lora_B")
    }
    taken.extend(torch.autograd.grad(out.square().mean(), list(parts.values())))
    return dict(zip(parts, taken, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_equal_those_of_the_explicit_formula(fused: bool, recompute: bool) -> None:
    # As on CUDA: joined first, adapted afterwards.
    decoder = Decoder(small_decoder().module, max_positions=64, fused=fused)
    add_adapters(decoder.module, LORA, seed=0)
    stir(decoder.module)
    expected = explicit_gradients(decoder)
    attend = PackedAttention([tuple(TOKENS)], decoder.device)
    hidden_TE = decoder.hidden(attend.token_ids_T, attend.positions_T, attend, recompute=recompute)
    decoder.logits(hidden_TE).square().mean().backward()
    for name, parameter in decoder.module.named_parameters():
        if name not in expected:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        scale = expected[name].abs().max()
        assert scale > 1e-4
        torch.testing.assert_close(
            parameter.grad / scale, expected[name] / scale, atol=5e-6, rtol=1e-5
        )


def test_fused_layers_pass_the_same_gradients_as_single_ones() -> None:
    """On CUDA q, k and v are one product; their adapters stay three, and one may be missing."""
    layer: Any = adapted(Lora(rank=4, alpha=8, exclude_modules="k_proj")).module
    stir(layer)
    block = layer.model.layers[0].self_attn
    parts = (block.q_proj, block.k_proj, block.v_proj)
    x_TE = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights_F = torch.linspace(-1, 1, sum(part.out_features for part in parts))
    learnt = [p for part in parts for n, p in part.named_parameters() if n.startswith("lora")]
    assert len(learnt) == 4
    single = torch.cat([part(x_TE) for part in parts], dim=1)
    expected = torch.autograd.grad((single * weights_F).sum(), [x_TE, *learnt])
    out_TF = FusedLinear(*parts)(x_TE)
    torch.testing.assert_close(out_TF, single)
    got = torch.autograd.grad((out_TF * weights_F).sum(), [x_TE, *learnt])
    torch.testing.assert_close(got, expected)


def test_only_a_and_b_are_trainable_and_in_float32() -> None:
    decoder = adapted(dtype=torch.bfloat16)
    for name, parameter in decoder.module.named_parameters():
        is_adapter = name.endswith(("lora_A", "lora_B"))
        assert parameter.requires_grad == is_adapter
        assert parameter.dtype == (torch.float32 if is_adapter else torch.bfloat16)


COARSE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@COARSE
def test_a_zero_update_keeps_low_precision_weights_bit_for_bit(
    dtype: torch.dtype,
) -> None:
    rng = torch.Generator().manual_seed(1)
    base = torch.randn(256, 256, generator=rng).mul(0.02).to(dtype)
    odd = [0.0, 1.0, -1.0, 0.5, -0.25, 2.0**-10, -(2.0**-10), 65000.0, 1e-7]
    base[0, : len(odd)] = torch.tensor(odd).to(dtype)
    assert torch.equal((base.float() + rounding_offsets(base)).to(dtype), base)


@COARSE
def test_small_updates_change_low_precision_weights_correctly_on_average(
    dtype: torch.dtype,
) -> None:
    """A hundredth of a step: rounded as it is, next to nothing of it would arrive."""
    rng = torch.Generator().manual_seed(1)
    base = torch.randn(512, 512, generator=rng).mul(0.02).to(dtype)
    change = torch.randn(512, 4, generator=rng) @ torch.randn(4, 512, generator=rng)
    change *= 2e-4 * torch.finfo(dtype).eps / change.std()

    def arrived(total: Tensor) -> float:
        moved = total.to(dtype).float() - base.float()
        return float((moved * change).sum() / (change * change).sum())

    assert arrived(base.float() + change) < 0.1
    assert arrived(base.float() + change + rounding_offsets(base)) == pytest.approx(1.0, abs=0.1)


def test_a_low_precision_weight_is_summed_in_float32_and_rounded_once() -> None:
    decoder = adapted(dtype=torch.bfloat16)
    stir(decoder.module)
    for layer in adapters(decoder.module).values():
        exact = layer.base.float() + layer.scale * layer.lora_B @ layer.lora_A
        assert torch.equal(layer.weight, (exact + rounding_offsets(layer.base)).to(torch.bfloat16))


def test_the_base_model_shares_memory_with_the_adapted_one() -> None:
    plain, decoder = small_decoder(), adapted()
    stir(decoder.module)
    base = strip_adapters(decoder.module, merged=False)
    with torch.no_grad():
        assert torch.equal(
            logits_of(Decoder(base, max_positions=64), TOKENS), logits_of(plain, TOKENS)
        )
    held = {p.data_ptr() for p in decoder.module.parameters()}
    held |= {layer.base.data_ptr() for layer in adapters(decoder.module).values()}
    assert {p.data_ptr() for p in base.parameters()} <= held
    assert [name for name, _ in base.named_parameters()] == [
        name for name, _ in plain.module.named_parameters()
    ]


def test_the_merged_model_is_plain_and_gives_the_same_output() -> None:
    decoder = adapted()
    stir(decoder.module)
    plain = copy.deepcopy(strip_adapters(decoder.module, merged=True))
    assert adapters(plain) == {}
    with torch.no_grad():
        expected = logits_of(decoder, TOKENS)
        assert torch.equal(logits_of(Decoder(plain, max_positions=64), TOKENS), expected)


def test_the_seed_determines_the_initial_adapters() -> None:
    first, again, other = (
        [layer.lora_A for layer in adapters(adapted(seed=seed).module).values()]
        for seed in (1, 1, 2)
    )
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, {"q_proj", "v_proj"}),
        ({"target_modules": "mlp.down_proj"}, {"down_proj"}),
        (
            {"exclude_modules": ["gate_proj", "up_proj", "down_proj"]},
            {"q_proj", "k_proj", "v_proj", "o_proj"},
        ),
    ],
)
def test_target_modules_match_the_end_of_layer_names(
    settings: dict[str, Any], expected: set[str]
) -> None:
    layers = adapters(adapted(Lora(rank=2, **settings)).module)
    assert {name.split(".")[-1] for name in layers} == expected
    assert len(layers) == 2 * len(expected)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"target_modules": ["qkv"]},
            r"target_modules='qkv' matches no .*'q_proj'.* or all-linear",
        ),
        ({"target_modules": ["lm_head"]}, r"='lm_head' matches no linear layer"),
        (
            {"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]},
            r"selects no linear layer of Qwen3ForCausalLM",
        ),
    ],
)
def test_target_modules_that_match_nothing_are_rejected(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        adapted(Lora(rank=2, **settings))


@pytest.mark.parametrize(("target", "warned"), [("all-linear", True), ("q_proj", False)])
def test_a_warning_says_that_experts_are_not_adapted(
    target: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = build_module("Qwen3Moe", **EXPERTS)
    weights = dict(module.named_parameters())
    linears = [n for n in weights if n.endswith("_proj.weight")]
    share = sum(weights[n].numel() for n in linears) / sum(w.numel() for w in weights.values())
    add_adapters(module, Lora(rank=2, target_modules=target), seed=0)
    assert not any("experts" in name for name in adapters(module))
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == warned
    if warned:
        assert "does not cover the experts of Qwen3MoeForCausalLM" in messages[0]
        assert f": {100 * share:.1f} % of its weights are adapted" in messages[0]


def test_a_model_without_experts_is_adapted_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    adapted()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("build", "config"),
    [(Qwen2ForCausalLM, Qwen2Config), (GemmaForCausalLM, GemmaConfig)],
)
def test_biases_and_other_architectures_are_adapted_too(build: type, config: type) -> None:
    module = seeded(build, config(**DIMENSIONS, head_dim=8))
    decoder = make_decoder(module, max_positions=64)
    with torch.no_grad():
        before = logits_of(decoder, TOKENS)
        add_adapters(module, LORA, seed=0)
        assert torch.equal(logits_of(decoder, TOKENS), before)
        stir(module)
        assert not torch.allclose(logits_of(decoder, TOKENS), before, atol=0.1)
    logits_of(decoder, TOKENS).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in module.parameters())
