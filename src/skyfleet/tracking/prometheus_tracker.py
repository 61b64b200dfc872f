"""PrometheusTracker: serves the last row of metrics in Prometheus' text format."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from threading import Lock, Thread
from typing import Any

from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.serving.access import AccessPolicy, build_access_policy, check_bind, format_url
from skyfleet.serving.threaded import Response, ThreadedHandler, ThreadedServer, make_error

PATH = "/metrics"

_NOT_IN_NAMES = re.compile(r"\W", re.ASCII)


def parse_key(key: str) -> tuple[str, str]:
    """The name and the label `where`: `reward/github/pass_at_4` is skyfleet_reward_pass_at_4, github.

    `environment/avg_turns`, over all environments, has the same name as
    `environment/github/avg_turns`, and an empty label.
    """
    first, *where, last = key.split("/") if "/" in key else ("", key)
    name = "_".join(filter(None, ("skyfleet", first, last)))
    return _NOT_IN_NAMES.sub("_", name), "/".join(where)


class _Server(ThreadedServer):
    """`render` returns the content type and the text of the metrics."""

    render: Callable[[], tuple[str, bytes]]


class _Handler(ThreadedHandler):
    server: _Server

    def respond(self, path: str, query: str) -> Response:
        if path != PATH:
            return make_error(HTTPStatus.NOT_FOUND, f"the metrics are at {PATH}")
        return HTTPStatus.OK, *self.server.render()


def build_metrics_policy(
    host: str, *, token: str | None, allowed_hosts: Sequence[str]
) -> AccessPolicy:
    """The rules of every server; ConfigError for one that other machines may read without a token."""
    check_bind(host, token, key="trainer.prometheus.host")
    policy = build_access_policy(
        host,
        token=token,
        allowed_hosts=allowed_hosts,
        open_paths=(),
        key="trainer.prometheus.allowed_hosts",
    )
    return replace(policy, max_body_bytes=0, remedy="add it to trainer.prometheus.allowed_hosts")


def check_port(host: str, port: int) -> None:
    """Listen on it for a moment; ConfigError if it is used. 0 is any that is free."""
    if not port:
        return
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"trainer.prometheus.port={port} on {host}: {error.strerror}; choose another, or 0 for any "
            "that is free"
        ) from None


class PrometheusTracker:
    """`http://host:port/metrics`: every metric of the last row that has it, and when it was logged.

    `skyfleet_last_row_timestamp_seconds` shows a run that hangs.
    """

    def __init__(
        self,
        *,
        run_name: str,
        port: int = 0,
        host: str = "127.0.0.1",
        token: str | None = None,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
            from prometheus_client.metrics_core import GaugeMetricFamily
        except ImportError:
            raise MissingExtraError("prometheus-client", "prometheus") from None
        self._family: Any = GaugeMetricFamily
        self._run_name = run_name
        self._lock = Lock()
        self._values: dict[str, float] = {}
        self._times = {"start": time.time()}
        registry = CollectorRegistry()
        registry.register(self)
        policy = build_metrics_policy(host, token=token, allowed_hosts=allowed_hosts)
        try:
            self._server = _Server(host, port, _Handler, policy)
        except OSError as error:
            raise ConfigError(
                f"trainer.prometheus.port={port}: {host} cannot be served there ({error.strerror}); "
                "choose another port, or 0 for a free one"
            ) from None
        self._server.render = lambda: (CONTENT_TYPE_LATEST, generate_latest(registry))
        self._thread = Thread(
            target=self._server.serve_forever, name="skyfleet-prometheus", daemon=True
        )
        self._thread.start()
        self.url = f"{format_url(host, self._server.server_port)}{PATH}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self._lock:
            self._values.update(metrics)
            self._values["step"] = float(step)
            self._times["last_row"] = time.time()

    def collect(self) -> Iterator[Any]:
        """Called by the server's thread for each request."""
        with self._lock:
            values, times = dict(self._values), dict(self._times)
        families: dict[str, Any] = {}
        for key, value in sorted(values.items()):
            name, where = parse_key(key)
            if name not in families:
                families[name] = self._family(
                    name, "A metric of docs/metrics.md", labels=("run", "where")
                )
            families[name].add_metric((self._run_name, where), value)
        yield from families.values()
        for event, seconds in times.items():
            name = f"skyfleet_{event}_timestamp_seconds"
            family = self._family(name, "Unix time", labels=("run",))
            family.add_metric((self._run_name,), seconds)
            yield family

    def sync(self) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
