"""Versions are compared as versions."""

from __future__ import annotations

import pytest

from skyfleet.engines.versions import at_least


@pytest.mark.parametrize(
    ("version", "least", "enough"),
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
def test_versions_are_ordered_by_their_numbers(version: str, least: str, enough: bool) -> None:
    assert at_least(version, least) is enough


def test_a_bound_that_is_no_version_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"least='newest' is no version"):
        at_least("1.0", "newest")
