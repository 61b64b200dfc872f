"""Rules of the fira world: the workflow, blocked stories and sprint capacity."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skyfleet.envs.tools import ToolError
from skyfleet.worlds.fira import fira, list_sprints
from skyfleet.worlds.toolkit import App


@pytest.fixture
def app() -> Iterator[App]:
    """Two stories: 30 is blocked by 31. The next sprint has 4 of 7 points free."""
    app = fira.open(0, fira.variables(0))
    for table in ("stories", "sprints", "links"):
        app.db.write(f"delete from {table}")
    app.db.insert("sprints", project="shop", name="next", capacity=7)
    for story, sprint, points in [(30, "backlog", 5), (31, "next", 3)]:
        place = {"project": "shop", "sprint": sprint, "title": "build door"}
        app.db.insert("stories", id=story, **place, status="todo", points=points)
    app.db.insert("links", story_id=30, blocked_by=31)
    yield app
    app.db.close()


def _move(app: App, story_id: int, *statuses: str) -> None:
    for status in statuses:
        fira.toolkit.call(app, "move_story", {"story_id": story_id, "status": status})


def test_an_invalid_transition_is_rejected_and_lists_the_valid_ones(app: App) -> None:
    with pytest.raises(ToolError, match=r"^story 31 is in todo; it can go to doing$"):
        _move(app, 31, "done")
    _move(app, 31, "doing")
    with pytest.raises(ToolError, match=r"^story 31 is in doing; it can go to review or todo$"):
        _move(app, 31, "done")


def test_a_blocked_story_is_done_only_after_its_blocker(app: App) -> None:
    with pytest.raises(ToolError, match=r"^story 30 is blocked by 31; finish that first$"):
        _move(app, 30, "doing", "review", "done")
    _move(app, 31, "doing", "review", "done")
    _move(app, 30, "done")


def test_a_sprint_takes_no_more_points_than_it_has_free(app: App) -> None:
    assert list_sprints(app, "shop") == [{"sprint": "next", "free_points": 4}]
    with pytest.raises(ToolError, match=r"^next has 4 points free; story 30 has 5$"):
        fira.toolkit.call(app, "plan_story", {"story_id": 30, "sprint": "next"})
    fira.toolkit.call(app, "plan_story", {"story_id": 31, "sprint": "backlog"})
    fira.toolkit.call(app, "plan_story", {"story_id": 30, "sprint": "next"})
    assert list_sprints(app, "shop") == [{"sprint": "next", "free_points": 2}]
