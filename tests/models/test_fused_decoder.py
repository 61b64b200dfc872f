"""A decoder over fused layers is the same function with the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fakes.small_models import llama, qwen2, qwen3
from torch import Tensor, nn

from skyfleet.models.decoder import Decoder
from skyfleet.models.fused import layers as of_layers
from skyfleet.models.packed import PackedAttention

# The second shares its first three tokens with the first, the third is the beginning of it.
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
def test_hidden_states_and_gradients(make: Callable[[], Any]) -> None:
    plain = outcome(make(), fused=False)
    # Tables of cosines are float32 in one and double in the other.
    torch.testing.assert_close(outcome(make(), fused=True), plain, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        outcome(make(), fused=True, recompute=True), plain, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
def test_layers_run_again_give_the_same_bits(make: Callable[[], Any]) -> None:
    kept, again = (
        outcome(make(), fused=True, recompute=recompute, dtype=torch.bfloat16)
        for recompute in (False, True)
    )
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call of a layer's middle; of 10 tokens, 3 are a piece."""
    middle = of_layers.FusedLayer._middle
    rows: list[int] = []

    def noted(layer: of_layers.FusedLayer, y_TE: Tensor) -> Tensor:
        rows.append(len(y_TE))
        return middle(layer, y_TE)

    monkeypatch.setattr(of_layers, "PIECE", 3)
    monkeypatch.setattr(of_layers.FusedLayer, "_middle", noted)
    return rows


def hidden_states(module: nn.Module, *, recompute: bool = False) -> Tensor:
    decoder = Decoder(module, max_positions=8, fused=True)
    attend = PackedAttention(SEQUENCES, decoder.device)
    return decoder.hidden(attend.token_ids_T, attend.positions_T, attend, recompute=recompute)


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
def test_long_sequences_go_through_the_middle_in_pieces(
    make: Callable[[], Any], pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as whole:
        whole.setattr(of_layers, "PIECE", 10)
        plain = outcome(make(), fused=True, recompute=True)
        with torch.no_grad():
            coarse_TE = hidden_states(make().bfloat16())
    torch.testing.assert_close(outcome(make(), fused=True, recompute=True), plain)
    with torch.no_grad():
        assert torch.equal(hidden_states(make().bfloat16()), coarse_TE)


def test_pieces_are_held_one_at_a_time(pieces: list[int]) -> None:
    hidden_TE = hidden_states(llama(), recompute=True)
    assert pieces == [3, 3, 3, 1] * 2
    hidden_TE.sum().backward()
    # Each layer again, for what goes into its pieces, and each piece for its gradient. Torch leaves
    # out a layer's last piece the first time, because nothing in the layer comes after it.
    assert 8 + 6 <= len(pieces) - 8 <= 8 + 8
    pieces.clear()
    with torch.no_grad():
        hidden_states(llama())
    assert pieces == [3, 3, 3, 1] * 2


def test_nothing_is_cut_where_all_is_kept_or_all_is_a_piece(
    pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(of_layers, "checkpoint")
    hidden_states(llama()).sum().backward()
    assert pieces == [10, 10]
    pieces.clear()
    monkeypatch.setattr(of_layers, "PIECE", 10)
    hidden_states(llama(), recompute=True).sum().backward()
    assert pieces == [10, 10] * 2


def test_a_fused_module_still_holds_its_own_weights() -> None:
    module = llama()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    layers = Decoder(module, max_positions=8, fused=True).fuse()
    assert all(torch.equal(before[name], weight) for name, weight in module.state_dict().items())
    with torch.no_grad():
        module.model.layers[0].self_attn.v_proj.weight.fill_(7.0)
    assert (layers[0].qkv.weight == 7.0).any()


def test_layers_that_are_joined_twice_stay_one_storage() -> None:
    """An engine joins what its learner's decoder has joined before."""
    module = qwen2()
    first, second = (Decoder(module, max_positions=8, fused=True).fuse() for _ in range(2))
    with torch.no_grad():
        module.model.layers[1].self_attn.k_proj.weight.fill_(7.0)
        module.model.layers[1].self_attn.v_proj.bias.fill_(9.0)
    for layers in (first, second):
        assert (layers[1].qkv.weight == 7.0).any()
        assert layers[1].qkv.bias is not None
        assert (layers[1].qkv.bias == 9.0).any()
