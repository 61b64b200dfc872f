"""vLLM versions that the engines support."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

MIN_TRAINABLE_VLLM = "0.23"
"""The first vLLM whose weights can be replaced layer by layer while requests wait."""
MIN_VLLM_WITH_TOKEN_IDS = "0.10.2"
"""The first vLLM that returns token ids."""


def is_at_least(version: str, minimum: str) -> bool:
    """`is_at_least("0.10.2", "0.9")` is True; a string that is no version is never enough."""
    found = _parse(version)
    return found is not None and found >= Version(minimum)


def _parse(version: str) -> Version | None:
    # Some builds append a tag that PEP 440 does not know: 0.23.0-cpu.
    for text in (version, version.partition("-")[0]):
        try:
            return Version(text)
        except InvalidVersion:
            continue
    return None
