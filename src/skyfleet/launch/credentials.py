"""Cloud credentials: the files that SkyPilot reads, written from the variables of CI secrets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialFile:
    cloud: str
    variable: str
    path: str
    """Relative to the home folder."""
    render: Callable[[str], str]


_FILES = (
    CredentialFile(
        cloud="lambda",
        variable="LAMBDA_API_KEY",
        path=".lambda_cloud/lambda_keys",
        render=lambda key: f"api_key = {key}\n",
    ),
    CredentialFile(
        cloud="runpod",
        variable="RUNPOD_API_KEY",
        path=".runpod/config.toml",
        render=lambda key: f"[default]\napi_key = {json.dumps(key)}\n",
    ),
    CredentialFile(
        cloud="vast",
        variable="VAST_API_KEY",
        path=".config/vastai/vast_api_key",
        render=lambda key: f"{key}\n",
    ),
    CredentialFile(
        cloud="primeintellect",
        variable="PRIME_INTELLECT_API_KEY",
        path=".prime/config.json",
        render=lambda key: json.dumps({"api_key": key}) + "\n",
    ),
    CredentialFile(
        cloud="nebius",
        variable="NEBIUS_CREDENTIALS_JSON",
        path=".nebius/credentials.json",
        render=lambda text: text,
    ),
    CredentialFile(
        cloud="nebius",
        variable="NEBIUS_TENANT_ID",
        path=".nebius/NEBIUS_TENANT_ID.txt",
        render=lambda text: f"{text}\n",
    ),
)
CREDENTIAL_VARIABLES = tuple(file.variable for file in _FILES)


def write_credentials(home: Path, environ: Mapping[str, str]) -> list[Path]:
    """Write each missing file whose variable is set, readable by this user only; return the new ones.

    A file that exists is the user's own and stays as it is.
    """
    written: list[Path] = []
    for file in _FILES:
        value, path = environ.get(file.variable, "").strip(), home / file.path
        if not value or path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Created with its final mode: nobody else can open it in between.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(file.render(value))
        written.append(path)
    return written
