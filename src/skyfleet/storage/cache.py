"""The cache of this machine for copies of objects: ~/.cache/skyfleet."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path


def find_cache_folder(kind: str, address: str) -> Path:
    """The folder for copies from an address, which may not exist yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # The same address may be on another server.
    server = os.environ.get("AWS_ENDPOINT_URL", "")
    return base / "skyfleet" / kind / sha256(f"{server} {address}".encode()).hexdigest()[:16]
