"""`import skyfleet` is cheap: names resolve on first use."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import skyfleet as sf

HEAVY = ("torch", "transformers", "pydantic", "numpy", "pyarrow", "scipy", "httpx", "rich")


def test_importing_skyfleet_imports_nothing_heavy() -> None:
    code = f"import sys, skyfleet; dir(skyfleet); print([m for m in {HEAVY} if m in sys.modules])"
    assert _run(code) == "[]"


def test_environments_and_settings_are_used_without_torch() -> None:
    code = (
        "import sys, skyfleet as sf; sf.ToolEnv(reward=lambda: 0.0); sf.GRPO(); sf.train;"
        "sf.evaluate('null', reward=lambda: 0.0, tasks=[{'prompt': 'Hello'}]);"
        "print('torch' in sys.modules)"
    )
    assert _run(code) == "False"


def test_dir_lists_the_public_names_and_each_resolves() -> None:
    assert dir(sf) == sorted(sf.__all__)
    for name in sf.__all__:
        assert getattr(sf, name) is not None


def test_the_version_is_that_of_the_installed_package() -> None:
    assert sf.__version__ == version("skyfleet")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'skyfleet' has no attribute 'trian'"):
        _ = sf.trian


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()
