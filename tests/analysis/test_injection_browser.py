"""No hostile text runs a script or sends a request from the report or the viewer, in Chromium."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.analysis.injection_payloads import list_payloads
from tests.analysis.report_runs import run_with_text
from tests.analysis.viewer_browser import chromium, go
from tests.analysis.viewer_run import hostile, viewing, write, write_run

from skyfleet.analysis.html.page import write_report
from skyfleet.analysis.viewer.server import ViewerServer
from skyfleet.trajectories.archive import eval_path

pytestmark = [pytest.mark.browser, pytest.mark.exhaustive]

FORBIDDEN = (
    "iframe, object, embed, base, meta[http-equiv=refresh], form[action], [srcdoc], [onload], "
    "[onerror], [onfocus], [ontoggle], [onbegin], [onmouseover], [onpageshow], [onstart], "
    "[href^='javascript'], [href^='data:text'], [src='x'], video, audio, math, marquee"
)


class Canary(ThreadingHTTPServer):
    """Records every request that it gets."""

    requests: list[str]


class _Handler(BaseHTTPRequestHandler):
    server: Canary

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        self.send_response(204)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    with Canary(("127.0.0.1", 0), _Handler) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@contextmanager
def watched(browser: Any, own: str) -> Iterator[Any]:
    """A page; dialogs, pop-ups, errors and requests to anything but `own` fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    seen: list[str] = []

    def dismiss(dialog: Any) -> None:
        seen.append(f"dialog {dialog.message}")
        dialog.dismiss()

    page.on("dialog", dismiss)
    page.on("pageerror", lambda error: seen.append(f"error {error}"))
    page.on("popup", lambda popup: seen.append(f"pop-up {popup.url}"))
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((own, "data:", "about:"))
            else seen.append(f"request {request.url}")
        ),
    )
    yield page
    assert page.evaluate("[window.broken, ({}).broken]") == [None, None]
    context.close()
    assert seen == []


def assert_inert(page: Any) -> None:
    """Open everything that can be opened, and look for elements that the payload added."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert page.locator(FORBIDDEN).count() == 0
    assert page.evaluate("[window.broken, ({}).broken]") == [None, None]


def test_the_report_runs_no_payload(browser: Any, canary: Canary, tmp_path: Path) -> None:
    payloads = list_payloads(f"http://127.0.0.1:{canary.server_port}")
    assert len(payloads) >= 31
    for number, (name, text) in enumerate(payloads.items()):
        # The text names files too: the run, its sets.
        short = text.replace("/", "\\").replace("\x00", "").encode(errors="ignore").decode()[:60]
        run = run_with_text(tmp_path / str(number), text, name=short)
        file = tmp_path / f"{number}.html"
        write_report([run], file)
        with watched(browser, file.as_uri()) as page:
            page.goto(file.as_uri())
            page.wait_for_selector("h1")
            assert page.locator("script").count() == 1, name
            assert page.locator("link").count() == 0, name
            assert page.locator("style").count() == 1, name
            assert_inert(page)
            page.keyboard.press("Tab")
    assert canary.requests == []


@pytest.fixture(scope="module")
def viewer(canary: Canary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewerServer]:
    run = write_run(tmp_path_factory.mktemp("runs"), plain=4)
    payloads = list_payloads(f"http://127.0.0.1:{canary.server_port}")
    episodes = [replace(hostile(text), sample=n) for n, text in enumerate(payloads.values())]
    write(eval_path(run / "trajectories", "payloads", 40), episodes)
    with viewing(run) as server:
        yield server


def test_the_viewer_runs_no_payload(browser: Any, canary: Canary, viewer: ViewerServer) -> None:
    payloads = list_payloads(f"http://127.0.0.1:{canary.server_port}")
    with watched(browser, viewer.url) as page:
        page.goto(viewer.url)
        page.wait_for_selector(".row:not(.waiting)")
        own = page.locator("script").count()
        for number, name in enumerate(payloads):
            entry = f"eval/payloads/40/{number}"
            for view in ("", "&tokens=1", f"&with=eval/payloads/40/{(number + 1) % len(payloads)}"):
                go(page, viewer, f"episode={entry}{view}")
                page.wait_for_selector(".heading", timeout=120_000)
                assert page.locator("script").count() == own, name
                assert page.locator("style").count() == 0, name
                assert page.locator("a[ping], img:not([src^='/']):not([src^='api'])").count() == 0
                assert_inert(page)
    assert canary.requests == []


def test_the_list_filters_and_addresses_run_no_payload(
    browser: Any, canary: Canary, viewer: ViewerServer
) -> None:
    payloads = list_payloads(f"http://127.0.0.1:{canary.server_port}")
    with watched(browser, viewer.url) as page:
        for text in payloads.values():
            short = quote(text[:300].encode(errors="ignore"))
            for address in (f"text={short}&env={short}&where={short}", f"episode={short}"):
                go(page, viewer, address)
                page.wait_for_selector("#count")
                assert_inert(page)
    assert canary.requests == []
