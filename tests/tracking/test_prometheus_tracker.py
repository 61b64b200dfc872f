"""The Prometheus endpoint serves the last value of every metric."""

from __future__ import annotations

import httpx
import pytest

from skyfleet.errors import ConfigError
from skyfleet.tracking.prometheus_tracker import PrometheusTracker, parse_key


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
    tracker = PrometheusTracker(host="127.0.0.1", port=0, run_name="r")
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
    tracker = PrometheusTracker(host="127.0.0.1", port=0, run_name="r")
    try:
        port = httpx.URL(tracker.url).port or 0
        with pytest.raises(ConfigError, match=rf"trainer\.prometheus\.port={port}: "):
            PrometheusTracker(host="127.0.0.1", port=port, run_name="r")
    finally:
        tracker.close()
