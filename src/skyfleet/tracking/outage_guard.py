"""OutageGuard: an exception of an experiment tracker is logged once, and the run goes on."""

from __future__ import annotations

import logging
from types import TracebackType

logger = logging.getLogger(__name__)


class OutageGuard:
    """`with guard:` around every call of a tracker's client; metrics.jsonl has the rows anyway."""

    def __init__(self, name: str) -> None:
        self._name, self._is_reported = name, False

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self._is_reported:
            self._is_reported = True
            logger.warning(
                "%s: not stored: %s: %s; the run goes on, further cases are not reported",
                self._name,
                type(error).__name__,
                error,
            )
        return True
