"""Moved to skyfleet.config.keys."""

from __future__ import annotations

from skyfleet.config.keys import as_yaml as as_yaml
from skyfleet.config.keys import diff as diff
from skyfleet.config.keys import explain as explain
from skyfleet.config.keys import flatten as flatten
