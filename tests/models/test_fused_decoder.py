"""A decoder on fused layers computes the same function with the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fakes.small_models import llama, qwen2, qwen3
from torch import Tensor, nn

from skyfleet.models.decoder import Decoder
from skyfleet.models.fused import layers as layers_module
from skyfleet.models.packed import PackedAttention

# The second shares its first three tokens with the first, the third is a prefix of it.
SEQUENCES = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 9, 8), (1, 2, 3), (7, 7)]


def outcome(
    module: nn.Module,
    *,
    fused: bool,
    recompute: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """The hidden states, then the gradient of every weight."""
    decoder = Decoder(module.to(dtype), max_positions=8, fused=fused)
    attend = PackedAttention(SEQUENCES, decoder.device)
    hidden_TE = decoder.hidden(attend.token_ids_T, attend.positions_T, attend, recompute=recompute)
    torch.manual_seed(2)
    (hidden_TE * torch.randn_like(hidden_TE)).sum().backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [hidden_TE.detach(), *grads]


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
def test_hidden_states_and_gradients_equal_the_plain_decoder(make: Callable[[], Any]) -> None:
    plain = outcome(make(), fused=False)
    # Tables of cosines are float32 in one and double in the other.
    torch.testing.assert_close(outcome(make(), fused=True), plain, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        outcome(make(), fused=True, recompute=True), plain, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
def test_recomputed_layers_give_the_same_bits(make: Callable[[], Any]) -> None:
    kept, again = (
        outcome(make(), fused=True, recompute=recompute, dtype=torch.bfloat16)
        for recompute in (False, True)
    )
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call of the MLP; 10 tokens in chunks of 3."""
    middle = layers_module.FusedLayer._mlp
    rows: list[int] = []

    def recorded(layer: layers_module.FusedLayer, y_TE: Tensor) -> Tensor:
        rows.append(len(y_TE))
        return middle(layer, y_TE)

    monkeypatch.setattr(layers_module, "MLP_CHUNK", 3)
    monkeypatch.setattr(layers_module.FusedLayer, "_mlp", recorded)
    return rows


def hidden_states(module: nn.Module, *, recompute: bool = False) -> Tensor:
    decoder = Decoder(module, max_positions=8, fused=True)
    attend = PackedAttention(SEQUENCES, decoder.device)
    return decoder.hidden(attend.token_ids_T, attend.positions_T, attend, recompute=recompute)


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
def test_a_chunked_mlp_gives_the_same_result(
    make: Callable[[], Any], chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as whole:
        whole.setattr(layers_module, "MLP_CHUNK", 10)
        plain = outcome(make(), fused=True, recompute=True)
        with torch.no_grad():
            coarse_TE = hidden_states(make().bfloat16())
    torch.testing.assert_close(outcome(make(), fused=True, recompute=True), plain)
    with torch.no_grad():
        assert torch.equal(hidden_states(make().bfloat16()), coarse_TE)


def test_long_passes_compute_the_mlp_in_chunks(chunks: list[int]) -> None:
    hidden_TE = hidden_states(llama(), recompute=True)
    assert chunks == [3, 3, 3, 1] * 2
    hidden_TE.sum().backward()
    # Each layer is recomputed for the inputs of its chunks, then each chunk for its gradient. Torch
    # skips the last chunk of a layer the first time, because nothing in the layer needs it.
    assert 8 + 6 <= len(chunks) - 8 <= 8 + 8
    chunks.clear()
    with torch.no_grad():
        hidden_states(llama())
    assert chunks == [3, 3, 3, 1] * 2


def test_the_mlp_is_not_chunked_if_activations_are_kept_or_fit_one_chunk(
    chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(layers_module, "checkpoint")
    hidden_states(llama()).sum().backward()
    assert chunks == [10, 10]
    chunks.clear()
    monkeypatch.setattr(layers_module, "MLP_CHUNK", 10)
    hidden_states(llama(), recompute=True).sum().backward()
    assert chunks == [10, 10] * 2


def test_a_fused_module_keeps_its_weights_and_shares_updates() -> None:
    module = llama()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    layers = Decoder(module, max_positions=8, fused=True).fuse()
    assert all(torch.equal(before[name], weight) for name, weight in module.state_dict().items())
    with torch.no_grad():
        module.model.layers[0].self_attn.v_proj.weight.fill_(7.0)
    assert (layers[0].qkv.weight == 7.0).any()


def test_layers_that_are_fused_twice_share_one_storage() -> None:
    """An engine fuses layers that the learner's decoder has already fused."""
    module = qwen2()
    first, second = (Decoder(module, max_positions=8, fused=True).fuse() for _ in range(2))
    with torch.no_grad():
        module.model.layers[1].self_attn.k_proj.weight.fill_(7.0)
        module.model.layers[1].self_attn.v_proj.bias.fill_(9.0)
    for layers in (first, second):
        assert (layers[1].qkv.weight == 7.0).any()
        assert layers[1].qkv.bias is not None
        assert (layers[1].qkv.bias == 9.0).any()
