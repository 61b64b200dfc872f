"""Weights go to a folder and come back, into the same tensors where asked."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
from tests.fakes.small_models import small_decoder

import skyfleet
from skyfleet.chat.renderers import make_renderer
from skyfleet.errors import ModelError
from skyfleet.models.loading import (
    LoadedModel,
    check_model_config,
    load_model,
    load_weights,
    save_model,
)
from skyfleet.models.tiny import build_tiny, train_tokenizer

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
CPU = torch.device("cpu")


def tiny(*, seed: int, tied: bool = True) -> LoadedModel:
    tokenizer = train_tokenizer(["a tool call"], vocab_size=300)
    overrides = {**SMALL, "tie_word_embeddings": tied}
    return LoadedModel(module=build_tiny(tokenizer, overrides, seed=seed), tokenizer=tokenizer)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_load_into_the_existing_tensors(tmp_path: Path, tied: bool) -> None:
    saved, other = tiny(seed=1, tied=tied), tiny(seed=2, tied=tied)
    save_model(saved, tmp_path)
    held = dict(other.module.named_parameters())
    load_weights(other.module, tmp_path)
    for name, parameter in saved.module.named_parameters():
        assert dict(other.module.named_parameters())[name] is held[name]
        torch.testing.assert_close(held[name], parameter, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_loads_unchanged(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = tiny(seed=1)
    saved.module.to(dtype=dtype)
    save_model(saved, tmp_path)
    loaded = load_model(str(tmp_path), dtype=dtype, device=CPU, config_kwargs={})
    weights = loaded.module.state_dict()
    for name, weight in saved.module.state_dict().items():
        assert weights[name].dtype == dtype
        torch.testing.assert_close(weights[name], weight, atol=0, rtol=0)
    renderers = make_renderer(saved.tokenizer), make_renderer(loaded.tokenizer)
    text = '<|im_start|>user\nclose issue 42<|im_end|>{"name": "close"}'
    one, other = (
        r.text(tokenizer.encode(text))
        for r, tokenizer in zip(renderers, (saved.tokenizer, loaded.tokenizer), strict=True)
    )
    assert one == other == text
    assert saved.tokenizer.encode(text) == loaded.tokenizer.encode(text)


def test_weights_of_another_model_are_rejected(tmp_path: Path) -> None:
    save_model(tiny(seed=1), tmp_path)
    with pytest.raises(
        ModelError,
        match=r"contains a different model: missing \['model.layers.1.*mismatched \['model.embed",
    ):
        load_weights(small_decoder(vocab_size=300).module, tmp_path)


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_folder_without_a_model_is_rejected_in_one_sentence(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        ModelError, match=r"^trainer.policy.model.path='.*' (is not a model folder|cannot)"
    ) as caught:
        load_model(str(tmp_path), dtype=torch.float32, device=CPU, config_kwargs={})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not a valid JSON file"),
        ("{}", "Should have a `model_type` key"),
        ('{"model_type": "qwen3", "hidden_size": "wide"}', "hidden_size.*wide"),
    ],
)
def test_a_dry_run_rejects_an_invalid_configuration_with_its_reason(
    tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"='{tmp_path}' cannot be loaded: .*{reason}") as caught:
        check_model_config(str(tmp_path), trust_remote_code=False)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_lists_the_alternatives(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a model folder .* 'tiny' or 'smollm2'"):
        load_model(str(tmp_path / "none"), dtype=torch.float32, device=CPU, config_kwargs={})


def test_a_size_mismatch_names_the_key(tmp_path: Path) -> None:
    save_model(tiny(seed=1), tmp_path)
    with pytest.raises(
        ModelError, match=r"do not have the sizes .*kwargs=\{'vocab_size': 512\}; .*kwargs=\{\}$"
    ):
        load_model(
            str(tmp_path), dtype=torch.float32, device=CPU, config_kwargs={"vocab_size": 512}
        )


def write_model_with_code(folder: Path, marker: Path) -> None:
    """A model folder whose config.json names code of its own, which writes `marker`."""
    save_model(tiny(seed=1), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own_model",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own_model'\n"
        "class OwnModel(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    )


def test_a_models_own_code_is_executed_only_if_the_key_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder, marker = tmp_path / "model", tmp_path / "executed"
    write_model_with_code(folder, marker)
    with pytest.raises(
        ModelError, match=r"needs Python code of its own.*trainer\.policy\.model\.trust_remote_code"
    ):
        load_model(str(folder), dtype=torch.float32, device=CPU, config_kwargs={})
    assert not marker.exists()
    loaded = load_model(
        str(folder), dtype=torch.float32, device=CPU, config_kwargs={}, trust_remote_code=True
    )
    assert marker.exists()
    assert type(loaded.module).__name__ == "OwnModel"


def test_every_call_of_transformers_and_torch_says_whether_it_trusts_code() -> None:
    """`trust_remote_code` is passed to every `from_pretrained`, `weights_only` to `torch.load`."""
    source = Path(skyfleet.__file__).parent
    checked = 0
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            needed = "trust_remote_code" if node.func.attr == "from_pretrained" else None
            needed = "weights_only" if called == "torch.load" else needed
            if needed:
                checked += 1
                assert needed in {word.arg for word in node.keywords}, f"{path}:{node.lineno}"
    assert checked >= 8
