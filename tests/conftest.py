"""What a machine lacks is skipped by name, never in silence."""

from __future__ import annotations

import shutil

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("chromium"):
        return
    missing = pytest.mark.skip(reason="no chromium here: apt-get install chromium")
    for item in items:
        if "browser" in item.keywords:
            item.add_marker(missing)
