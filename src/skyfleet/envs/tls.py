"""The TLS context of all HTTPS and WSS connections of the environment adapters."""

from __future__ import annotations

import ssl
from functools import cache

import httpx


@cache
def tls_context() -> ssl.SSLContext:
    """Load the CA bundle once per process: it takes 50 ms, longer than most tool calls."""
    return httpx.create_ssl_context()
