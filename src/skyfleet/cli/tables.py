"""Tables, for commands."""

from __future__ import annotations

from skyfleet.analysis.wording import table as table
