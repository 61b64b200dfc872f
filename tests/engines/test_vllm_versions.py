"""vLLM versions are compared by PEP 440."""

from __future__ import annotations

import pytest

from skyfleet.engines.vllm_versions import is_at_least


@pytest.mark.parametrize(
    ("version", "minimum", "enough"),
    [
        ("0.10.2", "0.9.1", True),
        ("0.9.1", "0.10.2", False),
        ("0.23.0", "0.23", True),
        ("0.23", "0.23.0", True),
        ("0.23.0.post1", "0.23.0", True),
        ("0.23.0+cu130", "0.23.0", True),
        ("0.23.0-cpu", "0.23.0", True),
        ("0.23.0rc2", "0.23.0", False),
        ("0.23.1.dev5+gabc", "0.23.0", True),
        ("0.23.1.dev5+gabc", "0.23.1", False),
        ("v1.0", "0.99", True),
        ("dev", "0.1", False),
        ("", "0.1", False),
    ],
)
def test_versions_are_ordered_by_their_numbers(version: str, minimum: str, enough: bool) -> None:
    assert is_at_least(version, minimum) is enough


def test_an_invalid_minimum_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"Invalid version: 'newest'"):
        is_at_least("1.0", "newest")
