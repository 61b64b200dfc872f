"""The healthcare world with all its task templates."""

from __future__ import annotations

from skyfleet.worlds.conversations.healthcare import care_templates, visit_templates
from skyfleet.worlds.conversations.healthcare.tools import healthcare

__all__ = ["care_templates", "healthcare", "visit_templates"]
