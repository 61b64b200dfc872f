"""The report in a real browser: nothing runs that we did not write, and keys work as well as a mouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.analysis.report_runs import small_run, telling_run

from skyfleet.analysis.html.page import write_report

pytest.importorskip("playwright")
from tests.analysis.report_screens import chromium, opened, take_screens

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

HOSTILE = "\"'><img src=x onerror=alert(1)><script>alert(2)<\\script><svg onload=alert(3)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def report(tmp_path: Path) -> Path:
    write_report([small_run(tmp_path / "run", n_steps=20)], tmp_path / "report.html")
    return tmp_path / "report.html"


def test_hostile_text_adds_no_element_and_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    counts: list[int] = []
    for text in (HOSTILE, "harmless"):
        page_file = tmp_path / f"{len(counts)}.html"
        write_report([telling_run(tmp_path, text)], page_file)
        with opened(browser, page_file) as (page, complaints):
            page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
            page.wait_for_timeout(100)
            assert complaints == []
            counts.append(page.locator("*").count())
            assert page.locator("img, iframe, object, embed").count() == 0
            assert page.locator("h1").inner_text() == text
    assert counts[0] == counts[1]


def test_the_page_asks_for_nothing_and_fits_every_width(browser: Browser, report: Path) -> None:
    for width in (1280, 700, 360):
        with opened(browser, report, width=width) as (page, complaints):
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert complaints == []


def test_a_chart_is_walked_with_the_arrow_keys(browser: Browser, report: Path) -> None:
    with opened(browser, report) as (page, _):
        chart = page.locator("#curves figure", has_text="unseen").first
        chart.locator("svg").focus()
        page.keyboard.press("ArrowRight")
        assert chart.locator(".readout").inner_text().startswith("step 0: 0.0")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert chart.locator(".readout").inner_text().startswith("step 20: 100.0")
        page.keyboard.press("Home")
        assert chart.locator(".readout").inner_text().startswith("step 0")
        page.keyboard.press("Tab")
        assert chart.locator(".readout").count() == 0


def test_the_pointer_reads_the_nearest_point(browser: Browser, report: Path) -> None:
    with opened(browser, report) as (page, _):
        chart = page.locator("#curves figure", has_text="unseen").first
        chart.locator("circle").last.hover()
        assert chart.locator(".readout").inner_text().startswith("step 20: 100.0")


def test_the_theme_follows_the_system_until_it_is_chosen(browser: Browser, report: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, report, scheme="dark") as (page, _):
        dark = page.evaluate(ground)
        button = page.get_by_role("button", name="Theme")
        assert button.inner_text() == "Theme: auto"
        button.click()
        light = page.evaluate(ground)
        assert (dark, light) == ("rgb(20, 23, 26)", "rgb(255, 255, 255)")
        page.reload()
        assert page.evaluate(ground) == light


def test_the_first_tab_skips_to_the_verdicts(browser: Browser, report: Path) -> None:
    with opened(browser, report) as (page, _):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the verdicts"
        page.keyboard.press("Enter")
        assert page.evaluate("location.hash") == "#verdicts"


def test_an_example_is_unfolded_and_its_place_copied(browser: Browser, report: Path) -> None:
    with opened(browser, report) as (page, _):
        episode = page.locator("#episodes details").first
        assert not episode.locator("ol").is_visible()
        episode.locator("summary").click()
        assert episode.locator("ol").is_visible()
        episode.get_by_role("button").last.click()
        assert page.evaluate("getSelection().toString()") == "#episode=eval/unseen/20/0"


def test_the_screens_are_small_and_differ(browser: Browser, report: Path, tmp_path: Path) -> None:
    screens = [screen.read_bytes() for screen in take_screens(browser, report, tmp_path)]
    assert len(set(screens)) == 3
    assert max(map(len, screens)) < 300_000
