"""PostRequest: one request to a server with its attempts, and the time that they lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from time import monotonic
from typing import Any, Literal

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
        self._phase: Literal["attempt", "pause", "answered"] = "pause"
        self._phase_started = monotonic()

    def begin_attempt(self) -> None:
        self._phase, self._phase_started, self.progress = "attempt", monotonic(), Progress()

    def end_phase(self) -> None:
        """An attempt has failed, or the pause after it is over."""
        now = monotonic()
        self.lost_seconds += now - self._phase_started
        self._phase, self._phase_started = "pause", now

    def end_answered(self, times: AnswerTimes) -> None:
        """A completion is sent at once: what its body takes longer is lost on the way."""
        now = monotonic()
        self._phase = "answered"
        times.record(self.max_tokens, now - self._phase_started)
        began = self.progress.first_byte_at
        if began is not None and now - began > MIN_LOSS_SECONDS:
            self.lost_seconds += now - began

    def seconds_until_unanswered(self, times: AnswerTimes) -> float:
        """How long the current attempt may still be only slow; 0 if it is unanswered or failed."""
        if self._phase != "attempt":
            return 0.0
        now, began = monotonic(), self.progress.first_byte_at
        if began is not None:
            return max(0.0, MIN_LOSS_SECONDS - (now - began))
        return max(0.0, times.patience_seconds(self.max_tokens) - (now - self._phase_started))

    def measure_loss(self, times: AnswerTimes) -> float:
        """The time lost so far, with the current attempt if it is unanswered."""
        if self._phase == "answered" or self.seconds_until_unanswered(times) > 0:
            return self.lost_seconds
        return self.lost_seconds + monotonic() - self._phase_started


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise EngineError(f"the request cannot be written as JSON: {error}") from error
    return text.encode(errors="replace")  # a lone surrogate has no bytes
