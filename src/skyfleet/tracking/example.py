"""Moved to `skyfleet.tracking.console`; removed when the branches are merged."""

from skyfleet.tracking.console import example as example
