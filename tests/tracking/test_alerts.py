"""Alerts: one thread per run, each alert once, and an outage never raises."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.alert_server import AlertServer, Answer, serve_alerts

from skyfleet.tracking.alerts import alert as alert_module
from skyfleet.tracking.alerts.alert import (
    Alert,
    AlertKind,
    AlertReceiver,
    AlertSender,
    read_retry_after,
)
from skyfleet.tracking.alerts.slack import SlackReceiver, format_message
from skyfleet.tracking.alerts.webhook import WebhookReceiver

Make = Callable[[AlertServer], AlertReceiver]
TOKEN = "xoxb-not-a-real-token"
START = Alert(kind=AlertKind.START, key="start/0", title="r started")
SCORES = Alert(kind=AlertKind.EVALUATION, key="evaluation/0", title="r step 0", text="| a | b |")
END = Alert(kind=AlertKind.END, key="end/3", title="r finished", step=3)


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_module, "FIRST_BACKOFF_SECONDS", 0.01)


def slack(server: AlertServer) -> SlackReceiver:
    pytest.importorskip("slack_sdk", reason="the extra slack is not installed")
    return SlackReceiver("#runs", token=TOKEN, base_url=f"{server.url}/api/")


def webhook(server: AlertServer) -> WebhookReceiver:
    return WebhookReceiver(f"{server.url}/hook?token=secret", run_name="r", project_name="p")


def send(
    folder: Path, receiver: AlertReceiver, *alerts: Alert, drain_seconds: float = 60.0
) -> None:
    sender = AlertSender([receiver], folder, drain_seconds=drain_seconds)
    for each in alerts:
        sender.send(each)
    sender.close()


def test_the_alerts_of_a_run_are_one_slack_thread(tmp_path: Path) -> None:
    with serve_alerts() as server:
        send(tmp_path, slack(server), START, SCORES, END)
    first, *replies = server.posts
    assert (first["_path"], first["_token"]) == ("/api/chat.postMessage", f"Bearer {TOKEN}")
    assert first["channel"] == "#runs"
    assert "thread_ts" not in first
    assert [reply["thread_ts"] for reply in replies] == ["1700000000.000000"] * 2
    assert replies[0]["text"] == ":bar_chart: *r step 0*\n```\n| a | b |\n```"
    # The end is also shown in the channel.
    assert [str(reply["reply_broadcast"]).lower() for reply in replies] in (
        ["false", "true"],
        ["0", "1"],
    )


def test_a_resumed_run_goes_on_in_its_thread_and_repeats_no_alert(tmp_path: Path) -> None:
    with serve_alerts() as server:
        send(tmp_path, slack(server), START, START, SCORES)
        send(tmp_path, slack(server), START, SCORES, END)
    assert len(server.posts) == 3
    assert server.posts[-1]["thread_ts"] == "1700000000.000000"
    stored = json.loads((tmp_path / "slack_alerts.json").read_text())
    assert stored["sent"] == ["start/0", "evaluation/0", "end/3"]
    assert TOKEN not in (tmp_path / "slack_alerts.json").read_text()


def test_a_run_that_resumes_on_another_machine_goes_on_in_its_thread(tmp_path: Path) -> None:
    with serve_alerts() as server:
        first = AlertSender([slack(server)], tmp_path)
        first.send(START)
        first.close()
        stored = json.loads(json.dumps(first.list_sent()))
        second = AlertSender([slack(server)], tmp_path / "elsewhere", sent=stored)
        second.send(START)
        second.send(END)
        second.close()
    assert [post.get("thread_ts") for post in server.posts] == [None, "1700000000.000000"]


@pytest.mark.parametrize("make", [slack, webhook])
def test_a_rate_limit_is_honoured_and_nothing_is_lost(tmp_path: Path, make: Make) -> None:
    limited: Answer = (429, {"Retry-After": "0.3"}, {"ok": False, "error": "ratelimited"})
    with serve_alerts(limited) as server:
        send(tmp_path, make(server), START, END)
    assert [post["_status"] for post in server.posts] == [429, 200, 200]
    assert server.posts[1]["_time"] - server.posts[0]["_time"] >= 0.3


@pytest.mark.parametrize("make", [slack, webhook])
def test_an_outage_is_retried_until_the_run_ends_and_the_first_alert_stays_the_first(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    down: Answer = (503, {}, {"ok": False, "error": "service_unavailable"})
    n_failures = alert_module.ATTEMPTS_BEFORE_WARNING + 1
    with serve_alerts(*[down] * n_failures) as server, caplog.at_level("WARNING"):
        send(tmp_path, make(server), START, END)
    assert [post["_status"] for post in server.posts] == [503] * n_failures + [200, 200]
    taken = [f"{post['text']} {post.get('title')}" for post in server.posts[n_failures:]]
    assert ["started" in text for text in taken] == [True, False]
    (record,) = caplog.records
    assert "they are tried again until the run ends" in record.getMessage()


def test_an_alert_that_waits_when_the_run_ends_is_tried_once_more(tmp_path: Path) -> None:
    limited: Answer = (429, {"Retry-After": "600"}, {"ok": False, "error": "ratelimited"})
    with serve_alerts(limited) as server:
        send(tmp_path, webhook(server), START, END)
    assert [post["_status"] for post in server.posts] == [429, 200, 200]


@pytest.mark.parametrize("make", [slack, webhook])
def test_a_server_that_is_gone_is_a_warning_without_secrets(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_alerts() as server:
        pass
    with caplog.at_level(logging.WARNING):
        send(tmp_path, make(server), START, SCORES, END, drain_seconds=0.2)
    assert "not sent: " in caplog.text
    assert len([r for r in caplog.records if r.name.startswith("skyfleet")]) <= 3, "not one each"
    assert "secret" not in caplog.text


def test_a_refused_token_is_reported_once_and_not_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused: Answer = (200, {}, {"ok": False, "error": "invalid_auth"})
    with serve_alerts(refused) as server, caplog.at_level(logging.WARNING):
        send(tmp_path, slack(server), START, SCORES, END)
    assert len(server.posts) == 1
    assert "Slack answers invalid_auth: check SLACK_BOT_TOKEN" in caplog.text


def test_a_webhook_gets_the_alert_as_json(tmp_path: Path) -> None:
    with serve_alerts() as server:
        send(tmp_path, webhook(server), END)
    (post,) = server.posts
    assert post["_path"] == "/hook?token=secret"
    assert {key: value for key, value in post.items() if not key.startswith("_")} == {
        "run": "r",
        "project": "p",
        "kind": "end",
        "key": "end/3",
        "step": 3,
        "title": "r finished",
        "text": "",
    }


def test_a_message_is_escaped_redacted_and_cut() -> None:
    text = "<!channel> & ``` Authorization: Bearer abcdef123456 " + "x" * 10_000
    message = format_message(Alert(kind=AlertKind.FAILED, key="k", title="a <b>", text=text))
    assert message.startswith(":x: *a &lt;b&gt;*\n```\n&lt;!channel&gt; &amp; '''")
    assert "abcdef123456" not in message
    assert len(message) < 4000


def test_retry_after_is_a_number_or_a_date() -> None:
    assert read_retry_after("2.5") == 2.5
    assert read_retry_after(["7"]) == 7.0
    assert read_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.1
    assert read_retry_after("1e9") == alert_module.MAX_RETRY_AFTER_SECONDS
    assert read_retry_after("soon") is None
    assert read_retry_after(None) is None
