"""Alert: one message about a run. AlertSender: sends alerts in the background, in order."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from pathlib import Path
from random import uniform
from typing import Any, Protocol

from skyfleet.errors import SkyfleetError
from skyfleet.redaction import redact
from skyfleet.storage.local import write_atomically
from skyfleet.tracking.background import BackgroundQueue, Pause

logger = logging.getLogger(__name__)

ALERTS_FILE = "alerts.json"
"""In the run folder: what was sent, and to which thread, for a resumed run."""
ATTEMPTS_BEFORE_WARNING = 6
"""Half a minute of an outage; it is retried until the run ends."""
FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0
MAX_RETRY_AFTER_SECONDS = 600.0
"""Longer pauses are cut to this one."""


DRAIN_SECONDS = 15.0
"""For the alerts that wait at the end of a run."""


class AlertKind(StrEnum):
    START = "start"
    EVALUATION = "evaluation"
    SENTINEL = "sentinel"
    UPLOAD = "upload"
    FAILED = "failed"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    kind: AlertKind
    key: str
    """An alert of a key that was sent is not sent again, also after the run is resumed."""
    title: str
    """One line."""
    text: str = ""
    """A Markdown table or sentences, shown with a fixed width."""
    step: int = 0


class TryAgainError(Exception):
    """The receiver did not accept an alert; `seconds` is its `Retry-After`, if it sent one."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


class RejectedError(Exception):
    """The receiver will accept no alert, such as with a wrong token."""


class AlertReceiver(Protocol):
    name: str
    state: dict[str, Any]
    """What a resumed run needs, such as the thread."""

    def send(self, alert: Alert) -> None:
        """Raise TryAgainError for an outage, RejectedError for a refusal."""
        ...


class AlertSender:
    """One thread per receiver. `send` returns at once and never raises."""

    def __init__(
        self,
        receivers: Sequence[AlertReceiver],
        folder: Path,
        *,
        sent: Mapping[str, Any] | None = None,
        drain_seconds: float | None = None,
    ) -> None:
        """`sent` is what `list_sent` returned; a file in the folder is newer."""
        self._channels = [
            _Channel(
                receiver,
                folder / f"{receiver.name}_{ALERTS_FILE}",
                (sent or {}).get(receiver.name),
                DRAIN_SECONDS if drain_seconds is None else drain_seconds,
            )
            for receiver in receivers
        ]

    def list_sent(self) -> dict[str, Any]:
        """By receiver: its thread and the keys of the alerts that it has."""
        return {channel.name: channel.list_sent() for channel in self._channels}

    def send(self, alert: Alert) -> None:
        for channel in self._channels:
            channel.put(alert)

    def finish(self) -> None:
        """Take no further alerts; the deadline of `close` begins."""
        for channel in self._channels:
            channel.queue.finish()

    def close(self) -> None:
        """Wait until all alerts are sent, for `drain_seconds` at most."""
        self.finish()
        for channel in self._channels:
            channel.queue.close()


class _Channel:
    """A receiver, what it has got, and its queue."""

    def __init__(
        self,
        receiver: AlertReceiver,
        path: Path,
        sent: Mapping[str, Any] | None,
        drain_seconds: float,
    ) -> None:
        self.name = receiver.name
        self._receiver, self._path = receiver, path
        self._sent = self._load(sent)
        self._queued = set(self._sent)
        self._is_rejected = self._is_outage_reported = False
        self.queue = BackgroundQueue[Alert](
            f"alerts to {receiver.name}", self._handle, drain_seconds=drain_seconds
        )

    def put(self, alert: Alert) -> None:
        if alert.key not in self._queued and not self._is_rejected:
            self._queued.add(alert.key)
            self.queue.put(alert)

    def _handle(self, alert: Alert, pause: Pause) -> None:
        if self._is_rejected:
            return
        wait_seconds, attempt, is_last = FIRST_BACKOFF_SECONDS, 1, False
        while True:  # the others wait, because the first one is the parent of the thread
            try:
                self._receiver.send(alert)
                break
            except RejectedError:
                self._is_rejected = True
                raise
            except TryAgainError as error:
                if is_last:
                    raise
                if attempt == ATTEMPTS_BEFORE_WARNING:
                    self._report_outage(error)
                # Jitter: all runs of a cluster meet an outage at the same time.
                seconds = error.seconds or uniform(0.5, 1.0) * wait_seconds
                wait_seconds = min(2 * wait_seconds, MAX_BACKOFF_SECONDS)
                # The run ends before that: once more, because the outage may be over.
                attempt, is_last = attempt + 1, not pause(seconds)
        self._sent.append(alert.key)
        self._save()

    def _report_outage(self, error: TryAgainError) -> None:
        if not self._is_outage_reported:
            self._is_outage_reported = True
            logger.warning(
                "alerts to %s wait: %s; they are tried again until the run ends, and further "
                "outages are not reported",
                self.name,
                redact(str(error)),
            )

    def list_sent(self) -> dict[str, Any]:
        return {"state": dict(self._receiver.state), "sent": list(self._sent)}

    def _load(self, sent: Mapping[str, Any] | None) -> list[str]:
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            state, keys = dict(stored["state"]), [str(key) for key in stored["sent"]]
        except FileNotFoundError:
            state, keys = (dict(sent["state"]), list(sent["sent"])) if sent else ({}, [])
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s: %s; the run starts a new thread", self._path, error)
            return []
        self._receiver.state.update(state)
        return keys

    def _save(self) -> None:
        try:
            write_atomically(self._path, json.dumps(self.list_sent(), indent=1) + "\n")
        except (OSError, SkyfleetError) as error:  # the run itself reports a full disk
            logger.debug("%s: %s", self._path, error)


def read_retry_after(header: object) -> float | None:
    """`Retry-After` in seconds, from a number or a date; None if it is missing or odd."""
    value = str(header[0] if isinstance(header, list) and header else header)
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):
            return None
    return min(max(seconds, 0.1), MAX_RETRY_AFTER_SECONDS)


def cut(text: str, max_characters: int) -> str:
    """Redacted, and short enough for a message."""
    text = redact(text)
    return text if len(text) <= max_characters else f"{text[:max_characters]}\n... (cut)"
