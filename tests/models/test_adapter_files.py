"""Adapters go to a folder as PEFT has them, and come back to the model they were trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.test_hf_decoder import EXPERTS, build_module
from tests.models.test_lora import LORA, TOKENS, stir

from skyfleet.config.policy import Lora
from skyfleet.errors import ModelError
from skyfleet.models.adapter_files import load_adapters, reject_adapter_checkpoint
from skyfleet.models.loading import LoadedModel, load_model, save_model
from skyfleet.models.lora import adapters, add_adapters, find_unmerged
from skyfleet.models.tiny import build_tiny, train_tokenizer

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}


def tiny(*, lora: Lora = LORA, seed: int = 1, dtype: torch.dtype = torch.float32) -> LoadedModel:
    tokenizer = train_tokenizer(["a tool call"], vocab_size=300)
    loaded = LoadedModel(module=build_tiny(tokenizer, SMALL, seed=seed), tokenizer=tokenizer)
    loaded.module.to(dtype=dtype)
    add_adapters(loaded.module, lora, seed=seed)
    return loaded


def test_adapters_are_saved_with_pefts_names_and_settings(tmp_path: Path) -> None:
    loaded = tiny(lora=Lora(rank=4, alpha=8, target_modules=["q_proj"]))
    stir(loaded.module)
    save_model(loaded, tmp_path)
    name = "model.layers.0.self_attn.q_proj"
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {key: tuple(tensor.shape) for key, tensor in saved.items()} == {
        f"base_model.model.{name}.lora_A.weight": (4, 32),
        f"base_model.model.{name}.lora_B.weight": (32, 4),
    }
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert settings["target_modules"] == [name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_folder_contains_the_merged_model(tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = tiny(dtype=dtype)
    stir(loaded.module)
    save_model(loaded, tmp_path)
    plain = load_model(str(tmp_path), dtype=dtype, device=torch.device("cpu"), config_kwargs={})
    assert adapters(plain.module) == {}
    for name, weight in plain.module.state_dict().items():
        assert torch.equal(weight, loaded.module.state_dict()[name])
    with torch.no_grad():
        ids = torch.tensor([TOKENS])
        one, other = (m(ids).logits for m in (plain.module.eval(), loaded.module.eval()))
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_load_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    saved, fresh = tiny(dtype=dtype), tiny(dtype=dtype)
    stir(saved.module)
    save_model(saved, tmp_path)
    load_adapters(fresh.module, tmp_path)
    for one, other in zip(saved.module.parameters(), fresh.module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (tiny(seed=2), r"differs from trainer.policy.model.path plus the saved adapters"),
        (
            tiny(lora=Lora(rank=2, alpha=8)),
            r"lora.rank=2, but the adapters in .* have rank=4; use the rank",
        ),
        (tiny(lora=Lora(rank=4, alpha=16)), r"lora.alpha=16, but .* have alpha=8; use the alpha"),
        (
            tiny(lora=Lora(rank=4, alpha=8, target_modules="q_proj")),
            r"do not match trainer.policy.model.lora",
        ),
    ],
)
def test_another_base_or_other_adapter_settings_are_rejected(
    tmp_path: Path, other: LoadedModel, sentence: str
) -> None:
    saved = tiny()
    stir(saved.module)
    save_model(saved, tmp_path)
    with pytest.raises(ModelError, match=sentence):
        load_adapters(other.module, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens", "model.layers.0.input_layernorm", "model.layers.0.mlp.up_proj"]
)
def test_a_base_that_differs_by_one_percent_is_rejected(
    tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    saved, other = tiny(dtype=dtype), tiny(dtype=dtype)
    stir(saved.module)
    save_model(saved, tmp_path)
    layer: Any = other.module.get_submodule(name)
    with torch.no_grad():
        getattr(layer, "base", layer.weight).mul_(1.009)
    with pytest.raises(
        ModelError, match=rf"{name}.weight differs from trainer.policy.model.path plus"
    ):
        load_adapters(other.module, tmp_path)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_adapters_load_in_another_precision(
    tmp_path: Path, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    base = tiny(dtype=torch.bfloat16).module.state_dict()
    saved, other = (tiny(dtype=dtype) for dtype in dtypes)
    for module in (saved.module, other.module):
        module.load_state_dict(base)
        for layer in adapters(module).values():
            layer.base.copy_(layer.weight)
    stir(saved.module)
    save_model(saved, tmp_path)
    load_adapters(other.module, tmp_path)
    taken_up = adapters(other.module)
    for name, layer in adapters(saved.module).items():
        assert torch.equal(taken_up[name].lora_B, layer.lora_B)


@torch.no_grad()
def test_a_base_may_differ_by_the_order_of_summation(tmp_path: Path) -> None:
    saved = tiny()
    stir(saved.module)
    for layer in adapters(saved.module).values():
        columns = (layer.lora_B[:, [r]] @ layer.lora_A[[r]] for r in (3, 1, 2, 0))
        layer.weight.copy_(sum(layer.scale * column for column in columns) + layer.base)
    assert find_unmerged(saved.module)
    save_model(saved, tmp_path)
    load_adapters(tiny().module, tmp_path)


def test_expert_weights_are_compared_too(tmp_path: Path) -> None:
    """They lie in a file otherwise than in memory."""
    tokenizer = train_tokenizer(["a tool call"], vocab_size=300)
    saved, same, other = (build_module("Qwen3Moe", **EXPERTS) for _ in range(3))
    for module in (saved, same, other):
        add_adapters(module, LORA, seed=1)
    stir(saved)
    save_model(LoadedModel(module=saved, tokenizer=tokenizer), tmp_path)
    load_adapters(same, tmp_path)
    with torch.no_grad():
        other.get_parameter("model.layers.0.mlp.experts.down_proj")[1, 2, 3] += 1e-3
    with pytest.raises(
        ModelError, match=r"experts.down_proj differs from trainer.policy.model.path"
    ):
        load_adapters(other, tmp_path)


def test_full_training_rejects_a_folder_with_adapters(tmp_path: Path) -> None:
    save_model(tiny(), tmp_path)
    with pytest.raises(
        ModelError, match=r"was trained with LoRA adapters, but .*lora.rank=0 trains"
    ) as e:
        reject_adapter_checkpoint(tmp_path)
    assert "\n" not in str(e.value)


def test_a_folder_without_adapters_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"has no LoRA adapters .* trainer.policy.model.lora.rank .* with rank=0"
    ):
        load_adapters(tiny().module, tmp_path)


def test_peft_loads_the_adapters_and_merges_to_the_same_bits(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="no peft here: pip install peft accelerate")
    base = build_tiny(train_tokenizer(["a tool call"], vocab_size=300), SMALL, seed=1)
    ours = tiny()
    stir(ours.module)
    save_model(ours, tmp_path)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merged = ours.module.state_dict()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, merged[name])
