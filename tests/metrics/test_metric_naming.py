"""Every metric key is written by one function."""

from __future__ import annotations

from skyfleet.metrics.rollout_metrics import key


def test_a_slash_inside_a_part_does_not_add_a_level() -> None:
    assert key("reward", "google/maps", "variance_per_prompt") == (
        "reward/google_maps/variance_per_prompt"
    )


def test_a_key_may_have_two_parts() -> None:
    assert key("timing", "rollout") == "timing/rollout"
