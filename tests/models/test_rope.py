"""A context is stretched in the model's configuration, so everyone who reads it agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.test_embedded_engine import SAMPLING, engine
from tests.fakes.small_models import VOCABULARY, logits_of, logprobs_of
from transformers import GPT2Config, Qwen3Config

from skyfleet.errors import ModelError
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import LoadedModel, load_model, save_model
from skyfleet.models.rope import change_rope
from skyfleet.models.tiny import build_tiny, train_tokenizer

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that knows 32 positions."""
    tokenizer = train_tokenizer(["a tool call"], vocab_size=300)
    module = build_tiny(tokenizer, SMALL, seed=1)
    save_model(LoadedModel(module=module, tokenizer=tokenizer), tmp_path)
    return tmp_path


def read(folder: Path, **changes: Any) -> Any:
    return load_model(str(folder), dtype=torch.float32, device=CPU, config_kwargs=changes).module


def test_logits_beyond_the_original_context_equal_those_of_transformers(folder: Path) -> None:
    module = read(folder, rope_parameters=YARN)
    assert module.config.max_position_embeddings == 128
    token_ids = torch.randint(VOCABULARY, (1, 128), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module(token_ids).logits[0]
        got = logits_of(Decoder(module, max_positions=128), token_ids[0].tolist())
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    plain = read(folder)
    with torch.no_grad():
        assert not torch.allclose(plain(token_ids[:, :32]).logits[0], expected[:32], atol=0.1)


async def test_engine_and_learner_agree_beyond_the_original_context(folder: Path) -> None:
    decoder = Decoder(read(folder, rope_parameters=YARN), max_positions=128)
    prompt = [(7 * i) % VOCABULARY for i in range(100)]
    completion = await engine(decoder).generate(prompt, SAMPLING, session="s")
    n_tokens = len(completion.token_ids)
    expected = logprobs_of(decoder, [*prompt, *completion.token_ids], n_tokens, temperature=0.8)
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_saved_policy_keeps_its_extended_context(folder: Path, tmp_path: Path) -> None:
    loaded = load_model(
        str(folder), dtype=torch.float32, device=CPU, config_kwargs={"rope_parameters": YARN}
    )
    save_model(loaded, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["rope_parameters"] == {**YARN, "rope_theta": 10_000.0}
    again = read(tmp_path / "saved")
    twice = read(tmp_path / "saved", rope_parameters=YARN)
    for module in (again, twice):
        assert module.config.max_position_embeddings == 128
        assert module.config.rope_parameters == written["rope_parameters"]


def test_rope_theta_can_be_set(folder: Path) -> None:
    """transformers keeps it among the rotary parameters and passes over it as a keyword."""
    module = read(folder, rope_theta=5e5)
    assert module.config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    # Of head width 16, the second frequency is theta to the power of -2/16.
    assert module.model.rotary_emb.inv_freq[1] == pytest.approx(5e5 ** (-1 / 8))


@pytest.mark.parametrize(
    ("own", "changes", "sentence"),
    [
        (
            {},
            {"rope_type": "dynamic", "factor": 2.0},
            r"rope_type='dynamic' is not supported for a model",
        ),
        ({}, {**YARN, "factor": 1.0}, r"^factor=1.0 with .* does not extend"),
        (
            {},
            {"rope_type": "yarn", "factor": 2.0},
            r"original_max_position_embeddings=0 does not extend",
        ),
        (
            {},
            {**YARN, "original_max_position_embeddings": 64},
            r"=64 exceeds the model's 32 positi",
        ),
        (
            {"max_position_embeddings": 256},
            YARN,
            r"gives 4.0 x 32 = 128 tokens, fewer than the model's 256",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            YARN,
            r"rope_type='yarn' is not supported for a model with rope_type='linear'",
        ),
    ],
)
def test_scaling_that_does_not_extend_the_context_is_rejected(
    own: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    config = Qwen3Config(**{"max_position_embeddings": 32, **own})
    with pytest.raises(ModelError, match=sentence):
        change_rope(config, changes)


def test_a_model_without_rope_cannot_be_scaled() -> None:
    with pytest.raises(ModelError, match=r"^gpt2 has no RoPE parameters"):
        change_rope(GPT2Config(), YARN)


def test_an_unknown_model_setting_is_rejected(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"model_config_kwargs.head_dims=8: qwen3 has no such"):
        read(folder, head_dims=8)
