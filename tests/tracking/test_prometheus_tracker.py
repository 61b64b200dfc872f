"""The Prometheus endpoint serves the last value of every metric."""

from __future__ import annotations

import httpx
import pytest

from skyfleet.errors import ConfigError
from skyfleet.tracking.prometheus_tracker import (
    PrometheusTracker,
    build_metrics_policy,
    parse_key,
)


@pytest.mark.parametrize(
    ("key", "name", "where"),
    [
        ("reward/github/pass_at_4", "skyfleet_reward_pass_at_4", "github"),
        ("environment/avg_turns", "skyfleet_environment_avg_turns", ""),
        ("step", "skyfleet_step", ""),
        ("eval-retail/a-b/x.y", "skyfleet_eval_retail_x_y", "a-b"),
        ("a/b/c/d", "skyfleet_a_d", "b/c"),
    ],
)
def test_a_key_is_a_name_and_the_label_where(key: str, name: str, where: str) -> None:
    assert parse_key(key) == (name, where)


def test_the_endpoint_shows_the_last_value_of_each_metric() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    tracker = PrometheusTracker(run_name="r")
    url = tracker.url
    try:
        before = httpx.get(url).text
        tracker.log({"environment/avg_turns": 3.0, "eval/all/pass_at_1": 0.25}, 4)
        tracker.log({"environment/avg_turns": 5.0, "environment/github/avg_turns": 7.0}, 5)
        text = httpx.get(url).text
    finally:
        tracker.close()
    assert "skyfleet_start_timestamp_seconds" in before
    assert "skyfleet_step" not in before
    samples = {
        (sample.name, sample.labels.get("where")): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["skyfleet_step", ""] == 5
    assert samples["skyfleet_environment_avg_turns", ""] == 5
    assert samples["skyfleet_environment_avg_turns", "github"] == 7
    assert samples["skyfleet_eval_pass_at_1", "all"] == 0.25
    assert ("skyfleet_last_row_timestamp_seconds", None) in samples
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_port_in_use_is_one_sentence() -> None:
    pytest.importorskip("prometheus_client")
    tracker = PrometheusTracker(run_name="r")
    try:
        port = httpx.URL(tracker.url).port or 0
        with pytest.raises(ConfigError, match=rf"trainer\.prometheus\.port={port}: "):
            PrometheusTracker(run_name="r", port=port)
    finally:
        tracker.close()


def test_a_request_needs_the_token_and_an_allowed_host() -> None:
    pytest.importorskip("prometheus_client")
    tracker = PrometheusTracker(run_name="r", token="s3cret", allowed_hosts=["train.example"])
    right = {"Authorization": "Bearer s3cret"}
    try:
        statuses = [
            httpx.get(tracker.url, headers=headers).status_code
            for headers in (
                right,
                {**right, "Host": "train.example:9400"},
                {},
                {"Authorization": "Bearer other"},
                {**right, "Host": "evil.example"},
                {**right, "Origin": "https://evil.example"},
            )
        ]
        refused = httpx.get(tracker.url, headers={**right, "Host": "evil.example"}).text
        elsewhere = httpx.get(tracker.url.replace("/metrics", "/"), headers=right)
    finally:
        tracker.close()
    assert statuses == [200, 200, 401, 401, 403, 403]
    assert "add it to trainer.prometheus.allowed_hosts" in refused
    assert (elsewhere.status_code, elsewhere.json()) == (
        404,
        {"error": "the metrics are at /metrics"},
    )


def test_other_machines_need_a_token() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.prometheus\.host='0\.0\.0\.0' lets other machines"
    ):
        build_metrics_policy("0.0.0.0", token=None, allowed_hosts=())
    policy = build_metrics_policy("0.0.0.0", token="s3cret", allowed_hosts=())
    asked = [(b"host", b"10.0.0.7:9400")]  # a pod's address
    assert policy.check("GET", "/metrics", [*asked, (b"authorization", b"Bearer s3cret")]) is None
    refusal = policy.check("GET", "/metrics", asked)
    assert refusal is not None
    assert refusal.status == 401
    with pytest.raises(
        ConfigError, match=r"trainer\.prometheus\.allowed_hosts 'a b' is not the name"
    ):
        build_metrics_policy("127.0.0.1", token=None, allowed_hosts=["a b"])
