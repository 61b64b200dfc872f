"""Classes: why each episode failed, worked out in the background and remembered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from itertools import groupby

from skyfleet.analysis.failures import classify
from skyfleet.analysis.run_folder import read_entries
from skyfleet.analysis.viewer.listing import Snapshot
from skyfleet.errors import SkyfleetError
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Trajectory

logger = logging.getLogger(__name__)

_PAUSE_SECONDS, _PAUSE_EPISODES = 0.001, 8
"""A rest after so many: who reads the page goes first."""


class Classes:
    def __init__(self) -> None:
        self._known: dict[Entry, str] = {}
        """Empty where there is no class."""
        self._seen: Snapshot | None = None
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.waiting = 0
        """How many are still to be classified."""
        self.trouble = ""
        """What the last file that could not be classified to its end had."""

    def __len__(self) -> int:
        """How many are known; what is known once stays as it is."""
        return len(self._known)

    def of(self, entry: Entry) -> str:
        """Empty while it is not known yet, and where there is none."""
        return self._known.get(entry, "")

    def read(self, entry: Entry, trajectory: Trajectory) -> str:
        """The class of an episode that has been loaded anyway."""
        if entry not in self._known:
            self._known[entry] = "" if entry.success else classify(trajectory) or ""
        return self._known[entry]

    def look_at(self, snapshot: Snapshot) -> None:
        """Classify what is new in it, one thread at a time."""
        with self._looking:
            # With none waiting, a thread that is still there only has to end.
            if snapshot is self._seen or (
                self.waiting and self._thread and self._thread.is_alive()
            ):
                return
            self._seen = snapshot
            new = [e for e in snapshot.entries if not e.success and e not in self._known]
            self.waiting = len(new)
            self._thread = threading.Thread(target=self._run, args=(new,), daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(timeout=5)

    def _run(self, entries: Sequence[Entry]) -> None:
        # Evaluations first: they are what people look at.
        by_file = sorted(entries, key=lambda e: (e.kind, -e.step, e.path, e.number))
        for path, of_file in groupby(by_file, key=lambda entry: entry.path):
            left = list(of_file)
            try:
                for n, (entry, trajectory) in enumerate(read_entries(left)):
                    self.read(entry, trajectory)
                    if n % _PAUSE_EPISODES == 0 and self._stop.wait(_PAUSE_SECONDS):
                        return
            except Exception as error:
                # Whatever it is, the other files are still to be classified.
                unforeseen = not isinstance(error, SkyfleetError | OSError)
                logger.warning("%s is not classified: %s", path, error, exc_info=unforeseen)
                self.trouble = f"{path.name}: {error}"
            # What could not be read has no class; asking again would not help.
            self._known |= dict.fromkeys((e for e in left if e not in self._known), "")
            self.waiting -= len(left)
