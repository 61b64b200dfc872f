"""Moved to skyfleet.config.validation and skyfleet.config.warnings."""

from __future__ import annotations

from skyfleet.config.validation import uses_native_tool_calling as is_native
from skyfleet.config.warnings import warn_native_tool_calling as lone_native_flag

__all__ = ["is_native", "lone_native_flag"]
