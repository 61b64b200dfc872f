"""Moved to `skyfleet.analysis.run_folder`; removed when the branches are merged."""

from skyfleet.analysis.run_folder import find_dumps as find_dumps
from skyfleet.analysis.run_folder import import_dumps as import_dumps
