"""Moved to skyfleet.config.validation and skyfleet.config.warnings."""

from __future__ import annotations

from skyfleet.config.validation import check_trainable as check_trainable
from skyfleet.config.validation import find_unsupported_values as unsupported
from skyfleet.config.validation import find_untrainable as untrainable
from skyfleet.config.warnings import warn_greedy_evaluation as greedy_attempts

__all__ = ["check_trainable", "greedy_attempts", "unsupported", "untrainable"]
