"""The decoder is transformers' own forward pass, written once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fakes.small_models import DIMENSIONS, VOCABULARY, logits_of, seeded
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from skyfleet.errors import ModelError
from skyfleet.models.decoder import Decoder

ARCHITECTURES = [
    (LlamaForCausalLM, LlamaConfig),
    (Qwen2ForCausalLM, Qwen2Config),
    (Qwen3ForCausalLM, Qwen3Config),
]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("build", "settings"), ARCHITECTURES)
def test_logits_equal_those_of_transformers(
    build: type, settings: type, tied: bool, kv_heads: int
) -> None:
    changes = {"tie_word_embeddings": tied, "num_key_value_heads": kv_heads}
    module = seeded(build, settings(**{**DIMENSIONS, **changes}))
    with torch.no_grad():
        for parameter in module.parameters():  # biases and norms begin at 0 and 1
            parameter.add_(0.05 * torch.randn_like(parameter))
    decoder = Decoder(module, max_positions=64)
    token_ids = torch.randint(VOCABULARY, (1, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module(token_ids).logits[0]
        got = logits_of(decoder, token_ids[0].tolist())
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_rope_scaling_of_the_model_is_applied() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    module = seeded(Qwen3ForCausalLM, Qwen3Config(**DIMENSIONS, rope_parameters=rope))
    token_ids = torch.randint(VOCABULARY, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module(token_ids).logits[0]
        got = logits_of(Decoder(module, max_positions=100), token_ids[0].tolist())
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_an_unsupported_architecture_is_rejected() -> None:
    module = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=8))
    with pytest.raises(ModelError, match=r"^GPT2LMHeadModel is not supported .*Qwen3ForCausalLM$"):
        Decoder(module, max_positions=8)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_unsupported_layer_types_are_rejected(changes: dict[str, Any], named: str) -> None:
    module = seeded(Qwen2ForCausalLM, Qwen2Config(**{**DIMENSIONS, **changes}))
    with pytest.raises(ModelError, match=named):
        Decoder(module, max_positions=8)


def test_more_positions_than_the_model_has_are_rejected() -> None:
    module = seeded(Qwen3ForCausalLM, Qwen3Config(**DIMENSIONS))
    with pytest.raises(
        ModelError, match=r"=257 tokens exceed the model's context of 256 positions"
    ):
        Decoder(module, max_positions=257)
