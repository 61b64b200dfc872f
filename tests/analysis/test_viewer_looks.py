"""The viewer's page fits narrow and wide windows, is legible light and dark, and can be read aloud."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.analysis.viewer_browser import (
    chromium,
    expect,
    expect_text,
    go,
    open_list,
    playwright,
)
from tests.analysis.viewer_run import HOSTILE, RICH, viewing, write_run
from tests.analysis.viewer_screens import take_screens

from skyfleet.analysis.viewer.server import ViewerServer

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[ViewerServer]:
    with viewing(run) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, server: ViewerServer) -> Iterator[Any]:
    with open_list(browser, server) as page:
        yield page


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_a_narrow_and_a_wide_window(
    browser: Any, server: ViewerServer, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    for view in ("", f"episode={RICH}", f"episode={HOSTILE}", f"episode={RICH}&with={HOSTILE}"):
        go(page, server, view)
        page.wait_for_selector(".heading" if view else ".row:not(.waiting)")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("reader.scrollWidth - reader.clientWidth") == 0
    if width == 400:
        expect(page, "#browse").to_be_hidden()
        go(page, server, f"episode={RICH}")
        expect_text(page, "#reader h2", "github")
        page.get_by_role("button", name="← Episodes").click()
        expect(page, "#list").to_be_visible()
    page.close()


def test_contrast_is_sufficient_in_light_and_dark(browser: Any, server: ViewerServer) -> None:
    """At least 4.5 to 1, as WCAG level AA requires."""
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 800})
        go(page, server, f"env=github&outcome=failed&episode={RICH}")
        page.wait_for_selector(".heading")
        page.wait_for_selector(".row .tag")
        names = "page panel ink muted accent passed failed unknown passed-soft failed-soft"
        colours = page.evaluate(
            """names => names.split(" ").concat("unknown-soft", "hover", "open", "given").map(name =>
                [name, getComputedStyle(document.body).getPropertyValue(`--${name}`).trim()])""",
            names,
        )
        shade = {name: luminance(colour) for name, colour in colours}
        pairs = [(ink, back) for ink in ("ink", "muted") for back in ("page", "panel", "open")]
        pairs += [(name, f"{name}-soft") for name in ("passed", "failed", "unknown")]
        pairs += [("accent", "panel"), ("accent", "page"), ("muted", "hover"), ("muted", "given")]
        assert {pair: contrast(shade, pair) for pair in pairs if contrast(shade, pair) < 4.5} == {}
        page.close()


def test_every_control_has_an_accessible_name(page: Any) -> None:
    for role, name in (
        ("search", "Filter episodes"),
        ("listbox", "Episodes"),
        ("combobox", "Environment"),
        ("combobox", "Failure class"),
        ("region", "Episode"),
    ):
        playwright.expect(page.get_by_role(role, name=name, exact=True)).to_be_visible()
    unnamed = "button, select, input, img, a"
    names = page.locator(unnamed).evaluate_all(
        "all => all.map(one => one.ariaLabel || one.alt || one.textContent.trim())"
    )
    assert all(names)


@pytest.mark.exhaustive
def test_the_screenshots_are_small_and_differ(
    browser: Any, server: ViewerServer, run: Path, tmp_path: Path
) -> None:
    screens = [screen.read_bytes() for screen in take_screens(browser, server, run, tmp_path)]
    assert len(set(screens)) == 5
    assert max(map(len, screens)) < 300_000


def luminance(colour: str) -> float:
    """Of `#rrggbb`, as WCAG 2 defines it."""
    values = [int(pair, 16) / 255 for pair in re.findall("[0-9a-f]{2}", colour)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(shade: dict[str, float], pair: tuple[str, str]) -> float:
    low, high = sorted(shade[name] for name in pair)
    return (high + 0.05) / (low + 0.05)
