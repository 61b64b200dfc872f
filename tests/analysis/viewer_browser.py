"""What tests of the viewer's page share: a real Chromium, and how to look at what it shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from skyfleet.analysis.viewer.server import ViewerServer

playwright = pytest.importorskip("playwright.sync_api")


@contextmanager
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@contextmanager
def at_the_list(browser: Any, server: ViewerServer) -> Iterator[Any]:
    """A page 1280 wide; whatever it complains of fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.on("console", lambda said: complaints.extend([said.text] * (said.type == "error")))
    page.goto(server.url)
    page.wait_for_selector(".row:not(.waiting)")
    yield page
    context.close()
    assert complaints == []


def go(page: Any, server: ViewerServer, address: str) -> None:
    """As if the address had been pasted into a new tab."""
    page.goto("about:blank")
    page.goto(f"{server.url}#{address}")


def expect(page: Any, selector: str) -> Any:
    return playwright.expect(page.locator(selector).first)


def says(page: Any, selector: str, words: str) -> None:
    expect(page, selector).to_contain_text(words)
