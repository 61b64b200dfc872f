"""SlackReceiver: one Slack thread per run."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from skyfleet.errors import MissingExtraError
from skyfleet.tracking.alerts.alert import (
    Alert,
    AlertKind,
    RejectedError,
    TryAgainError,
    cut,
    read_retry_after,
)

TOKEN_VARIABLE, URL_VARIABLE = "SLACK_BOT_TOKEN", "SLACK_API_URL"
TIMEOUT_SECONDS = 10
MAX_CHARACTERS = 3500
"""Slack cuts a message after 4,000 characters."""
_SYMBOLS = {
    AlertKind.START: ":rocket:",
    AlertKind.EVALUATION: ":bar_chart:",
    AlertKind.SENTINEL: ":warning:",
    AlertKind.UPLOAD: ":warning:",
    AlertKind.FAILED: ":x:",
    AlertKind.END: ":checkered_flag:",
}
_OUTAGES = frozenset(
    {"ratelimited", "internal_error", "fatal_error", "service_unavailable", "request_timeout"}
)


class SlackReceiver:
    """The first alert starts a thread in the channel, the others reply to it."""

    name = "slack"

    def __init__(self, channel: str, *, token: str, base_url: str | None = None) -> None:
        try:
            from slack_sdk import WebClient
            from slack_sdk.errors import SlackApiError
        except ImportError:
            raise MissingExtraError("slack_sdk", "slack") from None
        self._channel, self._error = channel, SlackApiError
        self.state: dict[str, Any] = {}
        # Retries are the sender's, which knows how long the run still waits.
        self._client = WebClient(
            token=token,
            base_url=base_url or os.environ.get(URL_VARIABLE) or WebClient.BASE_URL,
            timeout=TIMEOUT_SECONDS,
            retry_handlers=[],
            logger=_quiet_logger(),
        )

    def send(self, alert: Alert) -> None:
        thread = self.state.get("thread_ts") if self.state.get("channel") == self._channel else None
        try:
            answer = self._client.chat_postMessage(
                channel=self._channel,
                thread_ts=thread,
                # Ends and failures are also shown in the channel.
                reply_broadcast=thread is not None
                and alert.kind in (AlertKind.END, AlertKind.FAILED),
                text=format_message(alert),
                unfurl_links=False,
            )
        except self._error as error:
            self._raise(error)
        except Exception as error:  # no connection, or an answer that the client cannot read
            raise TryAgainError(f"{type(error).__name__}: {error}") from None
        if thread is None:
            self._keep_thread(answer)

    def _keep_thread(self, answer: Any) -> None:
        ts = answer.get("ts")
        if not isinstance(ts, str):
            raise TryAgainError("the answer has no ts, so it is not Slack's")
        self.state.update(channel=self._channel, thread_ts=ts)

    def _raise(self, error: Any) -> None:
        response = error.response
        status, reason = int(response.status_code), str(response.get("error") or "no answer")
        # What is not one of Slack's short names is a proxy's page.
        is_outage = reason in _OUTAGES or not re.fullmatch(r"[a-z0-9_]+", reason)
        if status == 429:
            raise TryAgainError(
                "rate limited", read_retry_after(response.headers.get("Retry-After"))
            )
        if status >= 500 or is_outage:
            raise TryAgainError(f"status {status}, {reason[:200]}") from None
        raise RejectedError(
            f"Slack answers {reason}: check {TOKEN_VARIABLE}, its scope chat:write, and that the bot "
            f"is in trainer.alerts.slack_channel={self._channel}"
        ) from None


def _quiet_logger() -> logging.Logger:
    """The client logs every failed request; the sender reports an outage once."""
    quiet = logging.getLogger(f"{__name__}.client")
    quiet.setLevel(logging.CRITICAL)
    return quiet


def format_message(alert: Alert) -> str:
    """Slack's markup; `&`, `<` and `>` are escaped, as they would mention people or make links."""
    title = _escape(cut(alert.title, 500))
    message = f"{_SYMBOLS[alert.kind]} *{title}*"
    if alert.text:
        body = _escape(cut(alert.text, MAX_CHARACTERS)).replace("```", "'''")
        message += f"\n```\n{body.rstrip()}\n```"
    return message


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
