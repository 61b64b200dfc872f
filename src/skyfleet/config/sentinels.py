"""Moved to skyfleet.config.trainer."""

from __future__ import annotations

from skyfleet.config.trainer import Mode as Mode
from skyfleet.config.trainer import Sentinels as Sentinels
