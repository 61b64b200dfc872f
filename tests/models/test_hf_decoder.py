"""Other architectures run by transformers' own forward pass, with our attention inside."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engines.test_embedded_engine import PROMPT, SAMPLING, engine
from tests.fakes.samples import random_groups
from tests.fakes.small_models import DIMENSIONS, VOCABULARY, logits_of, logprobs_of, seeded
from tests.learner.test_single_device_learner import SETTINGS, learner, on_policy

from skyfleet.errors import ModelError
from skyfleet.learner.optimizer import OptimizerSettings
from skyfleet.models import hf_decoder
from skyfleet.models.decoder import Decoder
from skyfleet.models.hf_decoder import HFDecoder, make_decoder
from skyfleet.models.loading import load_weights
from skyfleet.models.packed import PackedAttention

ODD_SCALES = {
    "attention_multiplier": 0.5,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 2.0,
}
EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Gemma", {"head_dim": 8}),
    ("Phi3", {"pad_token_id": 0}),
    ("Mistral", {"sliding_window": None}),
    ("Olmo2", {"pad_token_id": 0}),
    ("Granite", ODD_SCALES),
    ("Cohere", {"logit_scale": 0.25}),
    ("Qwen3Moe", EXPERTS),
    ("GPT2", {}),
]


def build_module(family: str, **changes: Any) -> Any:
    dimensions = {**DIMENSIONS, **changes}
    if family == "GPT2":
        dimensions = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 256, "vocab_size": 64}
        dimensions["initializer_range"] = 0.3
    build = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    return seeded(build, getattr(transformers, f"{family}Config")(**dimensions)).eval()


@pytest.mark.parametrize(("family", "changes"), MODELS)
def test_logits_equal_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    token_ids = torch.randint(VOCABULARY, (1, 48), generator=torch.Generator().manual_seed(1))
    module = build_module(family, **changes)
    with torch.no_grad():
        expected = module(token_ids).logits[0]
        decoder = make_decoder(module, max_positions=256)
        got = logits_of(decoder, token_ids[0].tolist())
    assert isinstance(decoder, HFDecoder)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "changes"), MODELS)
async def test_engine_and_learner_agree_turn_after_turn(
    family: str, changes: dict[str, Any]
) -> None:
    decoder = make_decoder(build_module(family, **changes), max_positions=256)
    policy_model, token_ids = engine(decoder), list(PROMPT)
    for turn in range(3):
        completion = await policy_model.generate(token_ids, SAMPLING, session="s")
        token_ids += completion.token_ids
        expected = logprobs_of(decoder, token_ids, len(completion.token_ids), temperature=0.8)
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        token_ids += [turn + 1] * 5


@pytest.mark.parametrize("family", ["Gemma", "Phi3", "Qwen3Moe"])
async def test_a_training_step_changes_weights_and_sampled_logprobs_match(family: str) -> None:
    module = build_module(family, **dict(MODELS)[family])
    decoder = make_decoder(module, max_positions=256)
    before = [p.clone() for p in module.parameters()]
    settings = replace(SETTINGS, optimizer=OptimizerSettings(lr=1e-3), max_tokens_per_microbatch=80)
    samples = on_policy(decoder, random_groups(2))
    report = await learner(decoder, settings).step(samples)
    assert report.metrics["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    moved = [not torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True)]
    assert all(moved)


@pytest.mark.parametrize("family", ["Gemma", "Phi3"])
def test_recomputing_saves_memory_and_gives_the_same_gradients(family: str) -> None:
    module = build_module(family, **dict(MODELS)[family])
    decoder = make_decoder(module, max_positions=256)
    attend = PackedAttention([s.token_ids for s in random_groups(2)], decoder.device)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[-1] += 1
        return tensor

    gradients = []
    for recompute in (False, True):
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden_TE = decoder.hidden(
                attend.token_ids_T, attend.positions_T, attend, recompute=recompute
            )
        loss = decoder.logits(hidden_TE).square().mean()
        gradients.append(torch.autograd.grad(loss, list(module.parameters())))
    assert kept[1] < kept[0] / 2
    torch.testing.assert_close(*gradients)


def test_saved_weights_load_from_a_folder(tmp_path: Path) -> None:
    for family in ("Gemma", "Qwen3Moe"):
        saved, other = (build_module(family, **dict(MODELS)[family]) for _ in range(2))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)
        make_decoder(saved, max_positions=256)
        saved.save_pretrained(tmp_path / family)
        load_weights(other, tmp_path / family)
        for one, two in zip(saved.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)


def test_the_slow_architecture_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    hf_decoder._warn_slow.cache_clear()
    with caplog.at_level(logging.WARNING, logger=hf_decoder.__name__):
        for _ in range(2):
            make_decoder(build_module("Gemma", head_dim=8), max_positions=64)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "GemmaForCausalLM runs with transformers' own forward pass"
    ]


def test_the_llama_family_uses_the_fast_decoder() -> None:
    assert type(make_decoder(build_module("Llama"), max_positions=64)) is Decoder


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        (
            "Mistral",
            {"sliding_window": 63},
            r"a sliding window of 63 tokens.*=64; lower them to 63",
        ),
        ("Gemma2", {"head_dim": 8, "sliding_window": 256}, r"^Gemma2Attention caps"),
        ("Mamba", {}, r"^MambaForCausalLM "),
        ("Jamba", {"use_mamba_kernels": False}, r"^JambaForCausalLM "),
        ("Bloom", {}, r"^BloomForCausalLM "),
        (
            "Gemma",
            {"head_dim": 8, "max_position_embeddings": 63},
            r"=64 tokens exceed the model's context of 63",
        ),
    ],
)
def test_unsupported_attention_is_rejected(
    family: str, changes: dict[str, Any], sentence: str
) -> None:
    module = build_module(family, **changes)
    with pytest.raises(ModelError, match=sentence) as caught:
        make_decoder(module, max_positions=64)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["Bloom", "Mamba"])
def test_a_model_without_a_context_length_is_rejected_for_its_layers(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32, num_hidden_layers=1, n_head=4, vocab_size=64
    )
    assert not hasattr(config, "max_position_embeddings")
    module = getattr(transformers, f"{family}ForCausalLM")(config)
    with pytest.raises(
        ModelError, match=r"has layers (without attention|of type linear_attention)"
    ):
        make_decoder(module, max_positions=64)


@pytest.mark.parametrize("max_positions", [32, 33])
def test_length_dependent_rope_is_rejected_beyond_its_original_length(max_positions: int) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    module = build_module(
        "Phi3", pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=32
    )
    if max_positions == 32:
        make_decoder(module, max_positions=max_positions)
        return
    with pytest.raises(
        ModelError, match=r"changes its RoPE beyond 32 tokens \(rope_type='longrope'\)"
    ):
        make_decoder(module, max_positions=max_positions)


def test_a_sliding_window_longer_than_the_context_is_accepted() -> None:
    decoder = make_decoder(build_module("Mistral", sliding_window=64), max_positions=64)
    assert isinstance(decoder, HFDecoder)
