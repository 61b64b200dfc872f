"""What models and environments say is only text in a real browser, and could do nothing if it were not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.analysis.viewer_browser import chromium, expect_text, go, open_list
from tests.analysis.viewer_run import HOSTILE, PAYLOAD, RICH, viewing, write_run

from skyfleet.analysis.viewer.server import ViewerAccess, ViewerServer

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewerServer]:
    with viewing(write_run(tmp_path_factory.mktemp("runs"))) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, server: ViewerServer) -> Iterator[Any]:
    with open_list(browser, server) as page:
        yield page


def test_text_of_models_and_environments_is_never_markup(page: Any, server: ViewerServer) -> None:
    own = page.locator("script").count()
    go(page, server, "where=eval:hostile&text=onerror")
    expect_text(page, ".row .task", PAYLOAD)
    expect_text(page, ".row .passage", "</script><img src=x onerror=")
    views = (
        f"episode={HOSTILE}",
        f"episode={HOSTILE}&tokens=1",
        f"episode={HOSTILE}&with={RICH}",
    )
    for view in views:
        go(page, server, view)
        page.wait_for_selector(".heading")
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        expect_text(page, "#reader", "<script>window.broken=1;alert(1)</script>")
        assert page.locator("script").count() == own
        assert page.locator("iframe, object, embed, svg").count() == 0
        assert page.locator("img[src='x'], [onerror], [onload]").count() == 0
        assert page.locator("[href^='javascript'], [src^='javascript']").count() == 0
        assert page.evaluate("window.broken") is None
    # The same in menus and in error messages of the server.
    assert PAYLOAD in " ".join(page.locator("[name=env] option").all_text_contents())


def test_the_security_policy_blocks_injected_scripts_and_requests(
    browser: Any, server: ViewerServer
) -> None:
    page = browser.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(server.url)
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.broken = 1";
            document.body.append(script);
            document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.broken = 1'>");
            return fetch("http://127.0.0.1:9/").catch(() => null);
        }"""
    )
    assert page.evaluate("window.broken") is None
    assert len([text for text in refused if "Content Security Policy" in text]) >= 3
    page.close()


def test_a_browser_logs_in_with_the_token_and_keeps_it_out_of_the_address(
    browser: Any, tmp_path: Path
) -> None:
    run, access = write_run(tmp_path, plain=4), ViewerAccess(token="a-token")
    context = browser.new_context()
    with viewing(run, access=access) as server:
        page = context.new_page()
        page.goto(server.url)
        assert "this viewer needs a token" in page.inner_text("body")
        page.goto(f"{server.url}?token=a-token#episode={RICH}")
        page.wait_for_selector(".heading")
        assert page.url == f"{server.url}#episode={RICH}"
        assert page.evaluate("document.cookie") == ""
        page.reload()
        page.wait_for_selector(".heading")
        context.close()
