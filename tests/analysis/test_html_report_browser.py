"""The report in a real browser: no foreign script runs, and the keyboard works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest
from tests.analysis.report_runs import run_with_text, small_run

from skyfleet.analysis.html.page import write_report

pytest.importorskip("playwright")
from tests.analysis.report_screens import Scheme, chromium, opened, take_screens

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

HOSTILE = "\"'><img src=x onerror=alert(1)><script>alert(2)<\\script><svg onload=alert(3)>"

# The contrast of every text as WCAG 2 defines it, for opaque colours.
CONTRASTS = """() => {
    document.querySelectorAll("details").forEach((one) => (one.open = true));
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const luminance = (colour) => {
        const linear = numbers(colour).slice(0, 3).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    const ground = (element) => {
        const colour = getComputedStyle(element).backgroundColor;
        return numbers(colour)[3] === 0 ? ground(element.parentElement) : colour;
    };
    const found = {};
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const element = walk.currentNode.parentElement;
        if (!walk.currentNode.data.trim() || element.closest("script, title")) continue;
        const style = getComputedStyle(element);
        const ink = element.closest("svg") ? style.fill : style.color;
        const shades = [luminance(ink), luminance(ground(element))].sort((a, b) => a - b);
        const name = `${ink} on ${ground(element)}: ${element.tagName} ${element.getAttribute("class")}`;
        found[name] = (shades[1] + 0.05) / (shades[0] + 0.05);
    }
    return found;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def report(tmp_path: Path) -> Path:
    write_report([small_run(tmp_path / "run", n_steps=20)], tmp_path / "report.html")
    return tmp_path / "report.html"


def test_hostile_text_adds_no_element_and_runs_no_script(browser: Browser, tmp_path: Path) -> None:
    counts: list[int] = []
    for text in (HOSTILE, "harmless"):
        page_file = tmp_path / f"{len(counts)}.html"
        write_report([run_with_text(tmp_path, text)], page_file)
        with opened(browser, page_file) as (page, complaints):
            page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
            page.wait_for_timeout(100)
            assert complaints == []
            counts.append(page.locator("*").count())
            assert page.locator("img, iframe, object, embed").count() == 0
            assert page.locator("h1").inner_text() == text
    assert counts[0] == counts[1]


def test_the_page_makes_no_request_and_fits_every_width(browser: Browser, report: Path) -> None:
    for width in (1280, 700, 360):
        with opened(browser, report, width=width) as (page, complaints):
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert complaints == []


def test_the_arrow_keys_move_through_a_chart(browser: Browser, report: Path) -> None:
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


def test_the_pointer_shows_the_nearest_point(browser: Browser, report: Path) -> None:
    with opened(browser, report) as (page, _):
        chart = page.locator("#curves figure", has_text="unseen").first
        chart.locator("circle").last.hover()
        assert chart.locator(".readout").inner_text().startswith("step 20: 100.0")


def test_the_theme_follows_the_system_until_it_is_set(browser: Browser, report: Path) -> None:
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


def test_an_example_unfolds_and_its_command_is_copied(browser: Browser, report: Path) -> None:
    with opened(browser, report) as (page, _):
        episode = page.locator("#episodes details").first
        assert not episode.locator("ol").is_visible()
        episode.locator("summary").click()
        assert episode.locator("ol").is_visible()
        episode.get_by_role("button").last.click()
        copied = page.evaluate("getSelection().toString()")
        assert copied.startswith("skyfleet view ")
        assert copied.endswith("/run --episode eval/unseen/20/0")


def test_all_text_is_legible_light_and_dark(browser: Browser, tmp_path: Path) -> None:
    """At least 4.5 to 1, as WCAG level AA requires."""
    runs = [small_run(tmp_path / name, n_steps=20, lifts=name != "a") for name in "abcdef"]
    write_report(runs, tmp_path / "report.html")
    for scheme in get_args(Scheme):
        with opened(browser, tmp_path / "report.html", scheme=scheme) as (page, _):
            texts = page.evaluate(CONTRASTS)
            assert len(texts) > 20
            assert {text: ratio for text, ratio in texts.items() if ratio < 4.5} == {}


def test_the_screenshots_are_small_and_differ(
    browser: Browser, report: Path, tmp_path: Path
) -> None:
    screens = [screen.read_bytes() for screen in take_screens(browser, report, tmp_path)]
    assert len(set(screens)) == 3
    assert max(map(len, screens)) < 300_000
