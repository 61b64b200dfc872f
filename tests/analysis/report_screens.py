"""Screenshots of the report: python -m tests.analysis.report_screens RUN docs/images."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from playwright.sync_api import Browser, Dialog, Page, sync_playwright

from skyfleet.analysis.html.page import write_report
from skyfleet.analysis.run_folder import open_run

Scheme = Literal["light", "dark"]

SCREENS: dict[str, tuple[Scheme, int, str]] = {
    "report_light": ("light", 1280, "header"),
    "report_dark": ("dark", 1280, "#signal"),
    "report_narrow": ("light", 400, "header"),
}
"""Scheme, width and start of the screenshot."""


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, page_file: Path, *, scheme: Scheme = "light", width: int = 1280
) -> Iterator[tuple[Page, list[str]]]:
    """The page in Chromium, with its requests and console errors."""
    seen: list[str] = []

    def refuse(dialog: Dialog) -> None:
        seen.append(dialog.message)
        dialog.dismiss()

    page = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("dialog", refuse)
    page.on("request", lambda request: seen.append(request.url))
    page.goto(page_file.as_uri())
    seen.remove(page_file.as_uri())
    yield page, seen
    page.close()


def take_screens(browser: Browser, page_file: Path, folder: Path) -> list[Path]:
    taken = []
    for name, (scheme, width, begin) in SCREENS.items():
        with opened(browser, page_file, scheme=scheme, width=width) as (page, _):
            page.locator(begin).evaluate("element => element.scrollIntoView()")
            taken.append(folder / f"{name}.png")
            page.screenshot(path=taken[-1])
    return taken


if __name__ == "__main__":
    run, images = map(Path, sys.argv[1:])
    with TemporaryDirectory() as folder, chromium() as browser:
        report = Path(folder) / "report.html"
        write_report([open_run(run)], report)
        take_screens(browser, report, images)
