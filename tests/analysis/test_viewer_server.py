"""The viewer's server: local, read-only, and exact."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.analysis.viewer_run import (
    HOSTILE,
    PAYLOAD,
    RICH,
    add_step,
    plain_episode,
    png,
    viewing,
    write,
    write_run,
)
from tests.trajectories.making import attempt

from skyfleet.analysis.dump_import import IMPORTED
from skyfleet.analysis.run_folder import open_run
from skyfleet.analysis.viewer import failure_classes as classes
from skyfleet.analysis.viewer import listing
from skyfleet.analysis.viewer import search as viewer_search
from skyfleet.analysis.viewer.api import PAGE_ROWS, Viewer
from skyfleet.analysis.viewer.server import ViewerServer
from skyfleet.chat.message import Message
from skyfleet.errors import ConfigError
from skyfleet.trajectories.archive import train_path
from skyfleet.trajectories.entry import index_path
from skyfleet.trajectories.index import search
from skyfleet.trajectories.trajectory import Trajectory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[httpx.Client]:
    with viewing(run) as server, httpx.Client(base_url=server.url) as client:
        yield client


def ask(client: httpx.Client, path: str, **params: str | int) -> Any:
    return client.get(path, params=params).raise_for_status().json()


def finished(client: httpx.Client, **params: str | int) -> Any:
    """The response of a finished search."""
    while (answer := ask(client, "/api/episodes", **params))["search"]["running"]:
        pass
    return answer


def classified(client: httpx.Client) -> Any:
    """The run when every failure is classified."""
    while (answer := ask(client, "/api/run"))["unclassified"]:
        pass
    return answer


def test_the_server_only_listens_on_loopback(run: Path) -> None:
    with viewing(run) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_a_foreign_host_header_is_rejected(client: httpx.Client) -> None:
    for name in ("evil.example", "127.0.0.1.evil.example:80", "", "localhost.evil.example"):
        answer = client.get("/api/run", headers={"Host": name})
        assert answer.status_code == 403
        assert f"Host {name!r} is not allowed; use 127.0.0.1" in answer.json()["error"]
    # Another port is a tunnel, not a foreign site.
    assert client.get("/api/run", headers={"Host": "localhost:9000"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_get_is_allowed(client: httpx.Client, method: str) -> None:
    answer = client.request(method, "/api/run")
    assert answer.status_code == 501
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path",
    [
        "/../config.yaml",
        "/..%2f..%2fserver.py",
        "/static/viewer.js",
        "/%2e%2e/api.py",
        "//etc/passwd",
        "/api/episode/../../config.yaml",
        "/api/episode/eval/../train/1/0",
        "/api/episode/train/..%2f..%2f/0",
        "/api/tokens/",
        "/api/picture/train/1/0/0",
        "/api/nothing",
    ],
)
def test_paths_outside_the_run_are_not_found(client: httpx.Client, path: str) -> None:
    # Sent raw, because httpx would normalise the dots.
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as raw:
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        raw.sendall(request.encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b'{"error": ' in answer


def test_every_response_has_the_security_headers(
    client: httpx.Client,
) -> None:
    for path in ("/", "/viewer.js", "/viewer.css", "/api/run", "/absent"):
        headers = client.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


def test_a_port_in_use_raises_a_config_error(run: Path) -> None:
    with viewing(run) as server:
        port = server.server_port
        with pytest.raises(ConfigError, match=f"--port {port}: .*; choose another"):
            ViewerServer(Viewer(open_run(run)), port)


def test_the_run_lists_its_filters(client: httpx.Client) -> None:
    answer = ask(client, "/api/run")
    assert answer["name"] == "night_run"
    assert answer["total"] == 604
    menus = answer["menus"]
    assert menus["where"] == {"eval:hostile": 1, "eval:unseen_tasks": 3, "train": 600}
    assert menus["step"] == {"0": 1, "1": 300, "40": 303}
    assert menus["outcome"] == {"passed": 201, "failed": 402, "unknown": 1}
    # Of 300 plain ones 152 are github's, and three divides 51 of their numbers.
    assert answer["by_env"]["github"] == {"passed": 2 * 51 + 1, "failed": 2 * 101 + 1}


def test_a_menu_counts_the_episodes_that_match_the_other_filters(client: httpx.Client) -> None:
    menus = ask(client, "/api/run", kind="eval", set="unseen_tasks", outcome="failed")["menus"]
    assert menus["where"] == {"eval:hostile": 1, "eval:unseen_tasks": 1, "train": 400}
    assert menus["outcome"] == {"passed": 1, "failed": 1, "unknown": 1}
    assert menus["step"] == {"0": 1}
    assert menus["env"] == {"github": 1}
    # An invalid filter is reported with the episodes; the menus still work.
    assert ask(client, "/api/run", outcome="won")["menus"]["step"]["1"] == 300


@pytest.mark.parametrize(
    ("params", "total"),
    [
        ({}, 604),
        ({"env": "github"}, 306),
        ({"outcome": "unknown"}, 1),
        ({"kind": "eval"}, 4),
        ({"set": "unseen_tasks", "step": "40"}, 2),
        ({"kind": "train", "step": "1", "outcome": "passed"}, 100),
        ({"env": "github", "outcome": "failed", "kind": "eval"}, 1),
        ({"env": "absent"}, 0),
    ],
)
def test_filters_are_combined(client: httpx.Client, params: dict[str, str], total: int) -> None:
    assert ask(client, "/api/episodes", **params)["total"] == total


def test_the_pages_contain_every_episode_once(client: httpx.Client) -> None:
    pages = [ask(client, "/api/episodes", page=page)["rows"] for page in range(5)]
    assert [len(page) for page in pages] == [PAGE_ROWS, PAGE_ROWS, PAGE_ROWS, 4, 0]
    assert len({row["id"] for page in pages for row in page}) == 604
    assert [row["step"] for row in pages[0][:1] + pages[3]] == [40, 1, 1, 1, 0]


def test_the_open_episode_has_its_position_in_the_list(client: httpx.Client) -> None:
    def place(**params: str | int) -> int | None:
        found: int | None = ask(client, "/api/episodes", open="train/1/42", **params)["open_at"]
        return found

    # Newest first: 303 of step 40 come before it, and 42 of its own step.
    assert place() == 345
    assert place(step=1) == 42
    assert place(step=1, page=1) == 42
    assert place(outcome="failed") is None
    assert ask(client, "/api/episodes", open="train/1/9999")["open_at"] is None


@pytest.mark.parametrize(
    ("sort", "first"), [("oldest", "eval/unseen_tasks/0/0"), ("turns", RICH), ("errors", RICH)]
)
def test_the_sort_order_decides_the_first_row(client: httpx.Client, sort: str, first: str) -> None:
    assert ask(client, "/api/episodes", sort=sort)["rows"][0]["id"] == first


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"outcome": "won"}, "outcome='won'; choose from ['passed', 'failed', 'unknown']"),
        ({"step": "x"}, "step='x'; pass an integer such as 40"),
        ({"page": "-1"}, "page='-1'; pass an integer such as 40"),
        ({"sort": "best"}, "sort='best'; choose from ['newest', "),
    ],
)
def test_an_invalid_filter_is_an_error_message(
    client: httpx.Client, params: dict[str, str], sentence: str
) -> None:
    answer = client.get("/api/episodes", params=params)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(sentence)


def test_a_search_shows_the_passage_and_ignores_tokens(run: Path, client: httpx.Client) -> None:
    found = finished(client, text="NUMBER 17 in")
    assert [row["id"] for row in found["rows"]] == ["train/40/17", "train/1/17"]
    assert found["rows"][0]["passage"] == "Close the issue number 17 in maps."
    assert found["search"]["seen"] == found["search"]["total"] == 604
    # A logprob in three records, but no text.
    assert len(list(search(open_run(run).entries(), "-0.6"))) == 3
    assert finished(client, text="-0.6")["total"] == 0


def test_a_search_respects_the_filters_and_finds_quotes_in_arguments(client: httpx.Client) -> None:
    assert finished(client, text='onerror="window', set="hostile")["total"] == 1
    assert finished(client, text='onerror="window', kind="train")["total"] == 0


def test_a_search_stops_at_its_limit(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer_search, "MAX_FINDS", 10)
    found = finished(client, text="Close the issue")
    assert (found["total"], found["search"]["running"]) == (10, False)
    # The newest steps are searched first.
    assert {row["step"] for row in found["rows"]} == {40}


def test_failures_are_classified_in_the_background(client: httpx.Client) -> None:
    answer = classified(client)
    counts = answer["menus"]["class"]
    assert counts["verifier fault"] == 1
    assert sum(counts.values()) == 403
    by_class = ask(client, "/api/run", **{"class": "verifier fault"})["menus"]
    assert by_class["step"] == {"40": 1}
    assert by_class["class"] == counts
    rows = ask(client, "/api/episodes", **{"class": "verifier fault"})["rows"]
    assert [(row["id"], row["class"]) for row in rows] == [
        ("eval/unseen_tasks/40/1", "verifier fault")
    ]


def test_an_episode_has_all_its_data(client: httpx.Client) -> None:
    answer = ask(client, f"/api/episode/{RICH}")
    assert [len(answer["prompt"]), len(answer["turns"]), answer["n_turns"]] == [2, 6, 6]
    (call,) = answer["turns"][4]["action"]["calls"]
    # A JavaScript number would round it to ...992.
    assert '"wait_ms": 9007199254740993' in call["arguments"]
    assert answer["turns"][1]["replies"][0]["is_error"] is True
    assert answer["grade"]["parts"] == {"issue closed": 1.0, "nothing else changed": 1.0}
    assert [row["id"] for row in answer["attempts"]] == ["eval/unseen_tasks/0/0", RICH]
    assert answer["why"] == []


def test_a_failed_episode_has_its_failure_class(client: httpx.Client) -> None:
    answer = ask(client, "/api/episode/train/1/1")
    assert answer["why"][0]["class"] == answer["class"] == "false completion"


def test_images_are_served_and_scriptable_types_are_not(client: httpx.Client) -> None:
    answer = client.get(f"/api/picture/{RICH}/0")
    assert (answer.headers["Content-Type"], answer.content) == ("image/png", png(480, 270))
    assert client.get(f"/api/picture/{RICH}/1").status_code == 404
    assert client.get(f"/api/picture/{HOSTILE}/0").status_code == 404
    (_, user) = ask(client, f"/api/episode/{HOSTILE}")["prompt"]
    assert user["parts"][1]["picture"] is None


def test_tokens_have_mask_logprobs_and_texts(client: httpx.Client) -> None:
    (answer,) = ask(client, f"/api/tokens/{RICH}")["transcripts"]
    assert answer["ids"] == [0, 1, 2, 3, 4, 5, 0, 6, 2, 7, 8, 9, 10, 5]
    assert answer["chosen"] == [0] * 6 + [1] * 8
    assert answer["logprobs"][5:9] == [0.0, -0.01, -0.2, -1.0]
    assert answer["texts"][:3] == ["<|im_start|>", "user", "\n"]


def test_markup_in_episodes_is_returned_as_text(client: httpx.Client) -> None:
    answer = ask(client, f"/api/episode/{HOSTILE}")
    assert answer["task"] == f"hostile-{PAYLOAD}"
    assert answer["turns"][0]["action"]["calls"][0]["name"] == PAYLOAD


def test_nan_and_half_a_surrogate_pair_are_served(tmp_path: Path) -> None:
    run = write_run(tmp_path, plain=1)
    odd = attempt(float("nan"), prompt=(Message(role="user", content="half \ud83d of it"),))
    write(train_path(run / "trajectories", 7), [odd])
    with viewing(run) as server, httpx.Client(base_url=server.url) as client:
        (row,) = ask(client, "/api/episodes", step=7)["rows"]
        assert row["reward"] is None
        assert b"half \\ud83d of it" in client.get("/api/episode/train/7/0").content


def test_a_growing_run_is_rescanned_and_open_pages_stay_consistent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_REFRESH_SECONDS", 0.0)
    run = write_run(tmp_path)
    with viewing(run) as server, httpx.Client(base_url=server.url) as client:
        first = ask(client, "/api/episodes")
        add_step(run, 41, 8)
        answer = ask(client, "/api/run")
        assert (answer["total"], answer["revision"]) == (612, first["revision"] + 1)
        later = ask(client, "/api/episodes", page=1, revision=first["revision"])
        assert later["total"] == 604
        assert ask(client, "/api/episodes")["rows"][0]["step"] == 41
        # A step repeated after a resume replaces the old one.
        write(train_path(run / "trajectories", 41), [replace(plain_episode(0, 41), task_key="new")])
        assert ask(client, "/api/episode/train/41/0")["task"] == "new"
        assert client.get("/api/episode/train/41/1").status_code == 404


def test_rewritten_episodes_are_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_REFRESH_SECONDS", 0.0)
    run = write_run(tmp_path, plain=0)
    add_step(run, 41, 9)
    with viewing(run) as server, httpx.Client(base_url=server.url) as client:
        before = classified(client)["menus"]["class"]
        # Six of nine fail, then two of four; the other four are removed.
        add_step(run, 41, 4)
        assert sum(before.values()) - sum(classified(client)["menus"]["class"].values()) == 4


def test_a_file_that_cannot_be_classified_is_reported_and_the_others_are_classified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def odd(trajectory: Trajectory) -> str:
        if trajectory.seconds > 0.7:
            raise ZeroDivisionError("division by zero")
        return "gave up"

    monkeypatch.setattr(classes, "classify", odd)
    with (
        viewing(write_run(tmp_path, plain=9)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        answer = classified(client)
        # Step 1 has 0.41 s per episode, step 40 and the evaluations more.
        assert answer["menus"]["class"] == {"gave up": 6}
        assert answer["trouble"].endswith(": division by zero")
    assert "Traceback" in caplog.text


def test_a_damaged_file_without_its_index_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path, plain=2)
    damaged = train_path(run / "trajectories", 40)
    damaged.write_bytes(b"no gzip")
    index_path(damaged).unlink()
    with viewing(run) as server, httpx.Client(base_url=server.url) as client:
        assert ask(client, "/api/episodes")["total"] == 6
    assert f"{damaged} is skipped" in caplog.text


def test_an_imported_run_lists_what_is_not_recorded(tmp_path: Path) -> None:
    run = write_run(tmp_path, plain=1)
    (run / IMPORTED).write_text("dumped_evals\n")
    with viewing(run) as server, httpx.Client(base_url=server.url) as client:
        assert ask(client, "/api/run")["model"].startswith("imported: configuration, tokens")


def test_a_run_without_episodes_is_an_empty_list(tmp_path: Path) -> None:
    run = write_run(tmp_path, plain=0)
    for file in run.glob("trajectories/**/*.gz"):
        file.unlink()
    with viewing(run) as server, httpx.Client(base_url=server.url) as client:
        assert ask(client, "/api/run")["total"] == 0
        assert ask(client, "/api/episodes")["rows"] == []
