"""Helpers of the viewer's browser tests, with a real Chromium."""

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
def open_list(browser: Any, server: ViewerServer) -> Iterator[Any]:
    """A page of width 1280; errors in its console fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.on("console", lambda message: errors.extend([message.text] * (message.type == "error")))
    page.goto(server.url)
    page.wait_for_selector(".row:not(.waiting)")
    yield page
    context.close()
    assert errors == []


def go(page: Any, server: ViewerServer, address: str) -> None:
    """As if the address had been pasted into a new tab."""
    page.goto("about:blank")
    page.goto(f"{server.url}#{address}")


def expect(page: Any, selector: str) -> Any:
    return playwright.expect(page.locator(selector).first)


def expect_text(page: Any, selector: str, text: str) -> None:
    expect(page, selector).to_contain_text(text)
