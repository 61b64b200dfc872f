"""The telecom world with all its task templates."""

from __future__ import annotations

from skyfleet.worlds.conversations.telecom import billing_templates, line_templates, plan_templates
from skyfleet.worlds.conversations.telecom.tools import telecom

__all__ = ["billing_templates", "line_templates", "plan_templates", "telecom"]
