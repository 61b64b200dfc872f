"""Retention: old checkpoints go, newest and protected ones stay."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from skyfleet.checkpoints.resume import complete_checkpoints
from skyfleet.storage.local import discard

logger = logging.getLogger(__name__)


def prune(root: Path, *, max_to_keep: int, protect: Collection[int]) -> None:
    """Keeps the newest `max_to_keep` and those whose step is in `protect`; -1 keeps all."""
    if max_to_keep < 0:
        return
    newest_first = sorted(complete_checkpoints(root), key=lambda c: c.step, reverse=True)
    for checkpoint in newest_first[max_to_keep:]:
        if checkpoint.step in protect:
            continue
        try:
            discard(checkpoint.folder)
        except OSError as error:
            logger.warning("%s is old and could not be removed: %s", checkpoint.folder, error)
