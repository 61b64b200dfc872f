"""Moved to `skyfleet.analysis.formatting`; removed when the branches are merged."""

from skyfleet.analysis.formatting import NOTHING as NOTHING
from skyfleet.analysis.formatting import counted as counted
from skyfleet.analysis.formatting import percent as percent
from skyfleet.analysis.formatting import percent_of as percent_of
from skyfleet.analysis.formatting import shown as shown
from skyfleet.analysis.formatting import steps_told as steps_told
from skyfleet.analysis.formatting import table as table
