"""Failure classes of the episodes, computed in a background thread and cached."""

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
"""Pause after this many episodes, so that requests of the page are served first."""


class FailureClassifier:
    def __init__(self) -> None:
        self._known: dict[Entry, str] = {}
        """By entry; empty if it has no class."""
        self._seen: Snapshot | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.waiting = 0
        """The number of episodes that are not classified yet."""
        self.trouble = ""
        """The last error, with the file that could not be classified."""

    def __len__(self) -> int:
        """The number of classified episodes, which only increases."""
        return len(self._known)

    def get(self, entry: Entry) -> str:
        """The class; empty if it is not known yet or there is none."""
        return self._known.get(entry, "")

    def classify(self, entry: Entry, trajectory: Trajectory) -> str:
        """Classify an episode that is already loaded."""
        if entry not in self._known:
            self._known[entry] = "" if entry.success else classify(trajectory) or ""
        return self._known[entry]

    def classify_new(self, snapshot: Snapshot) -> None:
        """Classify the new episodes of a snapshot in a background thread; one at a time."""
        with self._lock:
            # With none waiting, a thread that is alive is about to end.
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
        # Evaluations first, because readers open them first.
        by_file = sorted(entries, key=lambda e: (e.kind, -e.step, e.path, e.number))
        for path, file_entries in groupby(by_file, key=lambda entry: entry.path):
            remaining = list(file_entries)
            try:
                for n, (entry, trajectory) in enumerate(read_entries(remaining)):
                    self.classify(entry, trajectory)
                    if n % _PAUSE_EPISODES == 0 and self._stop.wait(_PAUSE_SECONDS):
                        return
            except Exception as error:
                # Continue with the other files after any error.
                unexpected = not isinstance(error, SkyfleetError | OSError)
                logger.warning("%s is not classified: %s", path, error, exc_info=unexpected)
                self.trouble = f"{path.name}: {error}"
            # Episodes that cannot be read have no class and are not tried again.
            self._known |= dict.fromkeys((e for e in remaining if e not in self._known), "")
            self.waiting -= len(remaining)
