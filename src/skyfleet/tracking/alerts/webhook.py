"""WebhookReceiver: posts each alert as JSON to a URL."""

from __future__ import annotations

from typing import Any

import httpx

from skyfleet.redaction import redact, remember_secrets, split_secret_url
from skyfleet.tracking.alerts.alert import (
    Alert,
    RejectedError,
    TryAgainError,
    cut,
    read_retry_after,
)

TIMEOUT_SECONDS = 10
MAX_CHARACTERS = 20_000


class WebhookReceiver:
    """Any receiver of JSON; redirects are not followed."""

    name = "webhook"

    def __init__(self, url: str, *, run_name: str, project_name: str) -> None:
        self._url, self._run_name, self._project_name = url, run_name, project_name
        self.state: dict[str, Any] = {}
        remember_secrets(split_secret_url(url))
        self._client = httpx.Client(timeout=TIMEOUT_SECONDS)

    def send(self, alert: Alert) -> None:
        body = {
            "run": self._run_name,
            "project": self._project_name,
            "kind": alert.kind.value,
            "key": alert.key,
            "step": alert.step,
            "title": cut(alert.title, 500),
            "text": cut(alert.text, MAX_CHARACTERS),
        }
        try:
            # Its body is not read: it may be endless, and the status says everything.
            with self._client.stream("POST", self._url, json=body) as response:
                status = response.status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TryAgainError(redact(f"{type(error).__name__}: {error}")) from None
        if status in (408, 425, 429) or status >= 500:
            seconds = read_retry_after(response.headers.get("Retry-After"))
            raise TryAgainError(f"status {status}", seconds)
        if not response.is_success:
            raise RejectedError(f"status {status}; check trainer.alerts.webhook_url")
