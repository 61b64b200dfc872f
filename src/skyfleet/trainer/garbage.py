"""Garbage: what was set up stays, and what rollouts make is looked through seldom."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """Looking through what stays to the end costs rollouts a tenth of their time."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    # An episode is thousands of small objects, and hardly any of them are in cycles.
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
