"""Refusal: a request the server will not do, as a status and one sentence."""

from __future__ import annotations


class RefusalError(Exception):
    """Never status 404: fleet-python takes it for a hiccup and asks again and again."""

    def __init__(self, status: int, detail: str | dict[str, object]) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail
