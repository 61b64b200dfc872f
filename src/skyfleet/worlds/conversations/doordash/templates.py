"""The doordash world with all its task templates."""

from __future__ import annotations

from skyfleet.worlds.conversations.doordash import delivery_templates, order_templates
from skyfleet.worlds.conversations.doordash.tools import doordash

__all__ = ["delivery_templates", "doordash", "order_templates"]
