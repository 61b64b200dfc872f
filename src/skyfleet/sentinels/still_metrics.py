"""Metrics that cannot move under a configuration, and why: so that nobody reads a meaning into them."""

from __future__ import annotations

from collections.abc import Mapping


def still_metrics(*, clips: bool, n_updates: int) -> Mapping[str, str]:
    """Key -> why it stays. `n_updates` is the optimiser steps a batch."""
    if clips and n_updates == 1:
        return {
            "policy/ppo_clip_ratio": "stays 0: with one update a batch the ratio is 1 wherever it "
            "is measured. It says nothing about the learning rate"
        }
    return {}
