"""PostRequest: one request to a server with its attempts, and the time that they lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from skyfleet.engines.engine_downtime import (
    MIN_BYTES_PER_SECOND,
    MIN_LOSS_SECONDS,
    AnswerTimes,
    find_limit_seconds,
)
from skyfleet.engines.loop_lateness import loop_lateness
from skyfleet.engines.response_body import Progress
from skyfleet.errors import EngineError


class PostRequest:
    """One post with its attempts, and the time that they lost.

    Inside `lateness`, time in which the event loop was busy elsewhere does not count.
    """

    def __init__(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.content = _encode(body)
        self.headers = {"Content-Type": "application/json", **headers}
        limit = body.get("max_tokens", body.get("max_completion_tokens"))
        self.max_tokens = limit if isinstance(limit, int) else 0
        self.problem = ""
        """Of the last attempt."""
        self.lost_seconds = 0.0
        self.lateness = loop_lateness()
        self._now = self.lateness.now
        self.progress = Progress(now=self._now)
        self._limit_seconds = find_limit_seconds()
        self._phase: Literal["attempt", "pause", "answered"] = "pause"
        self._phase_started = self._now()

    def begin_attempt(self) -> None:
        self._phase, self._phase_started = "attempt", self._now()
        self.progress = Progress(now=self._now)

    def end_phase(self) -> None:
        """An attempt has failed, or the pause after it is over."""
        now = self._now()
        self.lost_seconds += now - self._phase_started
        self._phase, self._phase_started = "pause", now

    def end_answered(self, times: AnswerTimes) -> None:
        """A completion is sent at once: what its body takes longer is lost on the way."""
        now = self._now()
        self._phase = "answered"
        times.record(self.max_tokens, now - self._phase_started)
        began = self.progress.first_byte_at
        if began is not None and now - began > self._body_seconds():
            self.lost_seconds += now - began

    def seconds_until_unanswered(self, times: AnswerTimes) -> float:
        """How long the current attempt may still be only slow; 0 if it is unanswered or failed."""
        if self._phase != "attempt":
            return 0.0
        now, began = self._now(), self.progress.first_byte_at
        if began is not None:
            return max(0.0, self._body_seconds() - (now - began))
        patience = times.patience_seconds(self.max_tokens, self._limit_seconds)
        return max(0.0, patience - (now - self._phase_started))

    def _body_seconds(self) -> float:
        """How long a healthy server may take for what it has sent of the body."""
        return MIN_LOSS_SECONDS + self.progress.n_bytes / MIN_BYTES_PER_SECOND

    def measure_loss(self, times: AnswerTimes) -> float:
        """The time lost so far, with the current attempt if it is unanswered."""
        if self._phase == "answered" or self.seconds_until_unanswered(times) > 0:
            return self.lost_seconds
        return self.lost_seconds + self._now() - self._phase_started


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise EngineError(f"the request cannot be written as JSON: {error}") from error
    return text.encode(errors="replace")  # a lone surrogate has no bytes
