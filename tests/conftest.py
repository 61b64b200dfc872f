"""What a machine lacks is skipped by name, never in silence; secrets of one test are not known in the next."""

from __future__ import annotations

import shutil

import pytest

from skyfleet import redaction


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("chromium"):
        return
    missing = pytest.mark.skip(reason="no chromium here: apt-get install chromium")
    for item in items:
        if "browser" in item.keywords:
            item.add_marker(missing)


@pytest.fixture(autouse=True)
def _no_known_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests use words such as `secret` as secrets, which would be redacted in the next test."""
    monkeypatch.setattr(redaction, "_known", {})
    monkeypatch.setattr(redaction, "_known_pattern", None)
