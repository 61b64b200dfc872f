"""Adapters go to a folder as PEFT has them, and come back to the model they were trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.models.test_lora import LORA, TOKENS, stir

from skyfleet.config.policy import Lora
from skyfleet.errors import ModelError
from skyfleet.models.adapter_files import load_adapted
from skyfleet.models.loading import Loaded, load_model, save_model
from skyfleet.models.lora import adapt, adapters
from skyfleet.models.tiny import build_tiny, train_tokenizer

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}


def tiny(*, lora: Lora = LORA, seed: int = 1, dtype: torch.dtype = torch.float32) -> Loaded:
    tokenizer = train_tokenizer(["a tool call"], vocab_size=300)
    loaded = Loaded(module=build_tiny(tokenizer, SMALL, seed=seed), tokenizer=tokenizer)
    loaded.module.to(dtype=dtype)
    adapt(loaded.module, lora, seed=seed)
    return loaded


def test_names_and_settings_are_pefts(tmp_path: Path) -> None:
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
def test_the_folder_holds_the_merged_model(tmp_path: Path, dtype: torch.dtype) -> None:
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
def test_adapters_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    saved, fresh = tiny(dtype=dtype), tiny(dtype=dtype)
    stir(saved.module)
    save_model(saved, tmp_path)
    load_adapted(fresh.module, tmp_path)
    for one, other in zip(saved.module.parameters(), fresh.module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (tiny(seed=2), r"is not trainer.policy.model.path plus the saved adapters"),
        (tiny(lora=Lora(rank=2)), r"other adapters than trainer.policy.model.lora asks for"),
        (tiny(lora=Lora(rank=4, target_modules="q_proj")), r"other adapters than"),
    ],
)
def test_another_base_or_other_adapters_are_refused(
    tmp_path: Path, other: Loaded, sentence: str
) -> None:
    saved = tiny()
    stir(saved.module)
    save_model(saved, tmp_path)
    with pytest.raises(ModelError, match=sentence):
        load_adapted(other.module, tmp_path)


def test_a_folder_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no adapters .* trainer.policy.model.lora.rank=0"):
        load_adapted(tiny().module, tmp_path)


def test_peft_reads_the_adapters_and_merges_to_the_same_bits(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="no peft here: pip install peft accelerate")
    base = build_tiny(train_tokenizer(["a tool call"], vocab_size=300), SMALL, seed=1)
    ours = tiny()
    stir(ours.module)
    save_model(ours, tmp_path)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merged = ours.module.state_dict()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, merged[name])
