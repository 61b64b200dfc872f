"""The viewer's page in a real browser: it filters, searches, reads and compares."""

from __future__ import annotations

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
from tests.analysis.viewer_run import RICH, add_step, viewing, write_run

from skyfleet.analysis.viewer.server import ViewerServer

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


def test_a_long_list_has_few_elements(page: Any) -> None:
    expect_text(page, "#count", "604 episodes")
    assert page.locator("#list [role=option]").count() < 40
    page.evaluate("document.getElementById('list').scrollTop = 1e9")
    expect(page, "[aria-posinset='604']:not(.waiting)").to_be_visible()
    assert page.locator("#list [role=option]").count() < 40


def test_filters_narrow_the_list_and_are_in_the_address(page: Any, server: ViewerServer) -> None:
    page.select_option("[name=env]", "github")
    page.select_option("[name=outcome]", "failed")
    page.select_option("[name=where]", "eval:unseen_tasks")
    expect_text(page, "#count", "1 episode")
    assert page.url.endswith("#env=github&outcome=failed&where=eval%3Aunseen_tasks")
    page.reload()
    expect_text(page, "#count", "1 episode")
    assert page.input_value("[name=outcome]") == "failed"
    # A menu only offers values that the other filters match.
    steps = page.locator("[name=step] option")
    playwright.expect(steps).to_have_text(["All steps", "step 0 1"])
    go(page, server, "env=github&where=eval:unseen_tasks&step=1")
    expect_text(page, "#count", "No episode matches")
    playwright.expect(page.locator("[name=step]")).to_have_value("1")


def test_failure_classes_appear_without_reload_and_filter(page: Any) -> None:
    page.locator("[name=class] option[value='verifier fault']").wait_for(state="attached")
    page.select_option("[name=class]", "verifier fault")
    expect_text(page, "#count", "1 episode")
    expect_text(page, ".row .tag", "verifier fault")


def test_a_search_shows_the_matching_passage(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("number 17 in")
    expect_text(page, "#count", "2 episodes found")
    expect_text(page, ".row .passage", "Close the issue number 17 in maps.")
    page.fill("#filter-text", "no such text")
    expect_text(page, "#count", "No episode contains this text.")


def test_keys_navigate_from_the_list_through_episodes_and_back(page: Any) -> None:
    page.keyboard.press("j")
    page.keyboard.press("j")
    selected = page.locator("[aria-selected=true]")
    playwright.expect(selected).to_have_attribute("aria-posinset", "2")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    expect_text(page, "#reader h2", "github-close_by_title-f4dbdf21")
    assert page.url.endswith("#episode=train/40/0")
    for _ in range(4):
        page.keyboard.press("j")
    expect_text(page, "#reader h2", "booking-move_day-83dcefb7")
    page.keyboard.press("?")
    playwright.expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    playwright.expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("Escape")
    expect_text(page, "#reader h2", "Episodes")
    page.go_back()
    expect_text(page, "#reader h2", "booking-move_day-83dcefb7")


def test_keys_continue_from_an_episode_opened_by_address(page: Any, server: ViewerServer) -> None:
    go(page, server, "episode=train/1/42")
    selected = page.locator("[aria-selected=true]")
    playwright.expect(selected).to_have_attribute("aria-posinset", "346")
    playwright.expect(selected).to_be_in_viewport()
    page.keyboard.press("j")
    page.wait_for_url("**/#episode=train/1/43")
    # An episode opened from a link, far from the loaded rows.
    page.evaluate("location.hash = '#episode=train/1/250'")
    playwright.expect(selected).to_have_attribute("aria-posinset", "554")
    page.keyboard.press("k")
    page.wait_for_url("**/#episode=train/1/249")


def test_an_episode_is_shown_as_a_conversation(page: Any, server: ViewerServer) -> None:
    go(page, server, f"episode={RICH}")
    expect_text(page, "#reader h2", "github-close_by_title-6a966fd2")
    expect_text(page, ".verdict", "Exactly the expected changes were made")
    expect_text(page, "#turn-1 .who", "engine 0.38 s")
    call = page.locator("#turn-1 details.call")
    assert not call.evaluate("call => call.open")
    playwright.expect(call.locator(".code").first).to_be_hidden()
    call.locator("summary").click()
    playwright.expect(call.locator(".code").first).to_have_text('{\n  "repo": "maps"\n}')
    playwright.expect(call.locator(".code").nth(1)).to_contain_text("login leak,8,carol")
    expect(page, "#turn-1 .reasoning .prose").to_be_hidden()
    page.locator("#turn-1 .reasoning summary").click()
    expect(page, "#turn-1 .reasoning .prose").to_be_visible()
    expect_text(page, "#turn-2 .call.failed", "Error: number wants an integer")
    expect_text(page, "#turn-3 .call.failed", "Malformed call")
    shot = page.locator("#turn-5 img")
    page.keyboard.press("f")
    assert page.locator("#reader details:not([open])").count() == 0
    shot.scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelector('#turn-5 img').naturalWidth === 480")
    page.keyboard.press("f")
    assert page.locator("#reader details[open]").count() == 0


def test_other_attempts_are_linked(page: Any, server: ViewerServer) -> None:
    go(page, server, f"episode={RICH}")
    page.get_by_role("navigation", name="Attempts at this task").get_by_role("link").first.click()
    expect_text(page, "#reader .badge", "failed, reward 0")
    assert page.url.endswith("#episode=eval/unseen_tasks/0/0")


def test_tokens_are_shown_on_demand_by_mask_and_probability(
    page: Any, server: ViewerServer
) -> None:
    go(page, server, f"episode={RICH}")
    expect_text(page, "#reader h2", "github-close_by_title-6a966fd2")
    assert page.locator(".tokens").count() == 0
    page.keyboard.press("t")
    expect_text(page, ".transcript", "14 tokens, 8 sampled")
    kinds = page.locator(".tokens .token").evaluate_all("all => all.map(one => one.className)")
    levels = [0, 1, 2, 3, 4, 0, 1, 0]
    assert kinds == ["token given"] * 6 + [f"token chosen p{level}" for level in levels]
    expect_text(page, ".tokens", "I close the issue")
    title = page.locator(".tokens .token").nth(8).get_attribute("title")
    assert title == "8: id 2, sampled, logprob -1, probability 0.368"
    page.keyboard.press("t")
    expect(page, ".talk").to_be_visible()


def test_two_episodes_are_compared_side_by_side(page: Any) -> None:
    page.select_option("[name=where]", "eval:unseen_tasks")
    page.select_option("[name=sort]", "task")
    expect_text(page, "#count", "3 episodes")
    page.locator("#list").focus()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("c")
    expect_text(page, "#tray", "github-close_by_title-6a966fd2")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect_text(page, "#reader", "First difference at turn 2")
    assert f"episode=eval/unseen_tasks/0/0&with={RICH}" in page.url
    follows = page.locator(".parting + .cell")
    playwright.expect(follows).to_have_attribute("aria-label", "Turn 2, left")
    # 8 and "closed" against "two": the words around them are not marked.
    assert page.locator(".parting + .cell mark").all_text_contents()[0].startswith("8")
    page.keyboard.press("Escape")
    expect_text(page, "#reader h2", "github-close_by_title-6a966fd2")


def test_a_missing_episode_is_an_error_message(browser: Any, server: ViewerServer) -> None:
    page = browser.new_page()
    page.goto(f"{server.url}#episode=train/1/9999")
    expect_text(page, "[role=alert]", "'train/1/9999': the run has no such episode")
    page.close()


def test_new_episodes_are_announced_and_loaded_on_request(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path, plain=4)
    with viewing(run) as server:
        page = browser.new_page()
        page.goto(server.url)
        expect_text(page, "#count", "12 episodes")
        add_step(run, 41, 3)
        expect_text(page, "#new-episodes", "Load 3 new episodes")
        page.click("#new-episodes")
        expect_text(page, "#count", "15 episodes")
        expect_text(page, ".row", "step 41")
        expect(page, "#new-episodes").to_be_hidden()
        page.close()
