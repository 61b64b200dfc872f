"""Certificates: whom we trust on https and wss."""

from __future__ import annotations

import ssl
from functools import cache

import httpx


@cache
def certificates() -> ssl.SSLContext:
    """Read once a process: reading the bundle takes 50 ms, longer than most tool calls."""
    return httpx.create_ssl_context()
