"""PostRequest: one request to a server with its attempts, and the time that they lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from time import monotonic
from typing import Any

from skyfleet.engines.engine_loss import MIN_LOSS_SECONDS, AnswerTimes
from skyfleet.engines.response_body import Progress
from skyfleet.errors import EngineError


class PostRequest:
    """One post with its attempts, and the time that they lost."""

    def __init__(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.content = _encode(body)
        self.headers = {"Content-Type": "application/json", **headers}
        limit = body.get("max_tokens", body.get("max_completion_tokens"))
        self.max_tokens = limit if isinstance(limit, int) else 0
        self.problem = ""
        """Of the last attempt."""
        self.lost_seconds = 0.0
        self.progress = Progress()
        self.is_in_flight = False
        self._phase_started = monotonic()

    def begin_attempt(self) -> None:
        self._phase_started, self.is_in_flight, self.progress = monotonic(), True, Progress()

    def end_phase(self) -> None:
        """An attempt has failed, or the pause after it is over."""
        now = monotonic()
        self.lost_seconds += now - self._phase_started
        self._phase_started, self.is_in_flight = now, False

    def end_answered(self, times: AnswerTimes) -> None:
        """A completion is sent at once: what its body takes longer is lost on the way."""
        now = monotonic()
        times.record(self.max_tokens, now - self._phase_started)
        began = self.progress.first_byte_at
        if began is not None and now - began > MIN_LOSS_SECONDS:
            self.lost_seconds += now - began

    def measure_loss(self, times: AnswerTimes) -> float:
        """The time lost so far, with the current attempt if it is more than a slow one."""
        now = monotonic()
        seconds, began = now - self._phase_started, self.progress.first_byte_at
        is_interrupted = began is not None and now - began > MIN_LOSS_SECONDS
        is_slow = self.is_in_flight and not is_interrupted
        if is_slow and not times.is_unanswered(self.max_tokens, seconds):
            return self.lost_seconds
        return self.lost_seconds + seconds


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise EngineError(f"the request cannot be written as JSON: {error}") from error
    return text.encode(errors="replace")  # a lone surrogate has no bytes
