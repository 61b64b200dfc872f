"""The viewer's page in a real browser: it filters, searches, reads and compares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.analysis.viewer_browser import (
    at_the_list,
    chromium,
    expect,
    go,
    playwright,
    says,
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
    with at_the_list(browser, server) as page:
        yield page


def test_the_list_holds_few_elements_however_long_it_is(page: Any) -> None:
    says(page, "#count", "604 episodes")
    assert page.locator("#list [role=option]").count() < 40
    page.evaluate("document.getElementById('list').scrollTop = 1e9")
    expect(page, "[aria-posinset='604']:not(.waiting)").to_be_visible()
    assert page.locator("#list [role=option]").count() < 40


def test_filters_narrow_the_list_and_stand_in_the_address(page: Any, server: ViewerServer) -> None:
    page.select_option("[name=env]", "github")
    page.select_option("[name=outcome]", "failed")
    page.select_option("[name=where]", "eval:unseen_tasks")
    says(page, "#count", "1 episode")
    assert page.url.endswith("#env=github&outcome=failed&where=eval%3Aunseen_tasks")
    page.reload()
    says(page, "#count", "1 episode")
    assert page.input_value("[name=outcome]") == "failed"
    # A menu offers what the other filters leave.
    steps = page.locator("[name=step] option")
    playwright.expect(steps).to_have_text(["Every step", "step 0 1"])
    go(page, server, "env=github&where=eval:unseen_tasks&step=1")
    says(page, "#count", "No episode is like this")
    playwright.expect(page.locator("[name=step]")).to_have_value("1")


def test_failure_classes_appear_by_themselves_and_filter(page: Any) -> None:
    page.locator("[name=class] option[value='verifier fault']").wait_for(state="attached")
    page.select_option("[name=class]", "verifier fault")
    says(page, "#count", "1 episode")
    says(page, ".row .tag", "verifier fault")


def test_a_search_shows_what_was_said(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("number 17 in")
    says(page, "#count", "2 episodes found")
    says(page, ".row .passage", "Close the issue number 17 in maps.")
    page.fill("#filter-text", "nobody says this")
    says(page, "#count", "Nobody says this here.")


def test_keys_lead_from_the_list_through_episodes_and_back(page: Any) -> None:
    page.keyboard.press("j")
    page.keyboard.press("j")
    selected = page.locator("[aria-selected=true]")
    playwright.expect(selected).to_have_attribute("aria-posinset", "2")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    says(page, "#reader h2", "github-close_by_title-f4dbdf21")
    assert page.url.endswith("#episode=train/40/0")
    for _ in range(4):
        page.keyboard.press("j")
    says(page, "#reader h2", "booking-move_day-83dcefb7")
    page.keyboard.press("?")
    playwright.expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    playwright.expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("Escape")
    says(page, "#reader h2", "Episodes")
    page.go_back()
    says(page, "#reader h2", "booking-move_day-83dcefb7")


def test_keys_go_on_from_an_episode_that_an_address_opened(page: Any, server: ViewerServer) -> None:
    go(page, server, "episode=train/1/42")
    selected = page.locator("[aria-selected=true]")
    playwright.expect(selected).to_have_attribute("aria-posinset", "346")
    playwright.expect(selected).to_be_in_viewport()
    page.keyboard.press("j")
    page.wait_for_url("**/#episode=train/1/43")
    # One that was opened from elsewhere and lies far from what is loaded.
    page.evaluate("location.hash = '#episode=train/1/250'")
    playwright.expect(selected).to_have_attribute("aria-posinset", "554")
    page.keyboard.press("k")
    page.wait_for_url("**/#episode=train/1/249")


def test_an_episode_reads_as_a_conversation(page: Any, server: ViewerServer) -> None:
    go(page, server, f"episode={RICH}")
    says(page, "#reader h2", "github-close_by_title-6a966fd2")
    says(page, ".verdict", "Exactly the expected changes were made")
    says(page, "#turn-1 .who", "engine 0.38 s")
    call = page.locator("#turn-1 details.call")
    assert not call.evaluate("call => call.open")
    playwright.expect(call.locator(".code").first).to_be_hidden()
    call.locator("summary").click()
    playwright.expect(call.locator(".code").first).to_have_text('{\n  "repo": "maps"\n}')
    playwright.expect(call.locator(".code").nth(1)).to_contain_text("login leak,8,carol")
    expect(page, "#turn-1 .reasoning .prose").to_be_hidden()
    page.locator("#turn-1 .reasoning summary").click()
    expect(page, "#turn-1 .reasoning .prose").to_be_visible()
    says(page, "#turn-2 .call.failed", "Error: number wants an integer")
    says(page, "#turn-3 .call.failed", "A call that could not be read")
    shot = page.locator("#turn-5 img")
    page.keyboard.press("f")
    assert page.locator("#reader details:not([open])").count() == 0
    shot.scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelector('#turn-5 img').naturalWidth === 480")
    page.keyboard.press("f")
    assert page.locator("#reader details[open]").count() == 0


def test_other_attempts_are_one_click_away(page: Any, server: ViewerServer) -> None:
    go(page, server, f"episode={RICH}")
    page.get_by_role("navigation", name="Attempts at this task").get_by_role("link").first.click()
    says(page, "#reader .badge", "failed, reward 0")
    assert page.url.endswith("#episode=eval/unseen_tasks/0/0")


def test_tokens_are_shown_on_demand_by_mask_and_probability(
    page: Any, server: ViewerServer
) -> None:
    go(page, server, f"episode={RICH}")
    says(page, "#reader h2", "github-close_by_title-6a966fd2")
    assert page.locator(".tokens").count() == 0
    page.keyboard.press("t")
    says(page, ".transcript", "14 tokens, 8 chosen")
    kinds = page.locator(".tokens .token").evaluate_all("all => all.map(one => one.className)")
    levels = [0, 1, 2, 3, 4, 0, 1, 0]
    assert kinds == ["token given"] * 6 + [f"token chosen p{level}" for level in levels]
    says(page, ".tokens", "I close the issue")
    title = page.locator(".tokens .token").nth(8).get_attribute("title")
    assert title == "8: id 2, chosen, logprob -1, probability 0.368"
    page.keyboard.press("t")
    expect(page, ".talk").to_be_visible()


def test_two_episodes_stand_side_by_side_with_their_difference(page: Any) -> None:
    page.select_option("[name=where]", "eval:unseen_tasks")
    page.select_option("[name=sort]", "task")
    says(page, "#count", "3 episodes")
    page.locator("#list").focus()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("c")
    says(page, "#tray", "github-close_by_title-6a966fd2")
    page.keyboard.press("j")
    page.keyboard.press("x")
    says(page, "#reader", "They part at turn 2")
    assert f"episode=eval/unseen_tasks/0/0&with={RICH}" in page.url
    follows = page.locator(".parting + .cell")
    playwright.expect(follows).to_have_attribute("aria-label", "Turn 2, left")
    # 8 and "closed" against "two": the words around them are not marked.
    assert page.locator(".parting + .cell mark").all_text_contents()[0].startswith("8")
    page.keyboard.press("Escape")
    says(page, "#reader h2", "github-close_by_title-6a966fd2")


def test_an_episode_that_is_not_there_is_one_sentence(browser: Any, server: ViewerServer) -> None:
    page = browser.new_page()
    page.goto(f"{server.url}#episode=train/1/9999")
    says(page, "[role=alert]", "'train/1/9999': the run holds no such episode")
    page.close()


def test_a_run_that_grows_says_so_and_is_read_when_asked(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path, plain=4)
    with viewing(run) as server:
        page = browser.new_page()
        page.goto(server.url)
        says(page, "#count", "12 episodes")
        add_step(run, 41, 3)
        says(page, "#new-episodes", "Read 3 new episodes")
        page.click("#new-episodes")
        says(page, "#count", "15 episodes")
        says(page, ".row", "step 41")
        expect(page, "#new-episodes").to_be_hidden()
        page.close()
