"""Paths: where a model may lie, asked without loading torch."""

from __future__ import annotations

from pathlib import Path

from skyfleet.errors import ModelError

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
