"""Moved to `skyfleet.analysis.run_folder`; removed when the branches are merged."""

from skyfleet.analysis.run_folder import OnDamage as OnDamage
from skyfleet.analysis.run_folder import read_entries as read_entries
from skyfleet.analysis.run_folder import warn as warn
