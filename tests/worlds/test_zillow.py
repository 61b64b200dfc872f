"""Rules of the zillow world: loan payments and tours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skyfleet.envs.tools import ToolError
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.zillow import zillow


@pytest.fixture
def app() -> Iterator[App]:
    """Two homes of one agent; another buyer tours one of them on Monday at 11."""
    app = zillow.open(0, zillow.variables(0))
    app.db.write("delete from tours")
    app.db.write("update loans set percent = 6, least_down_percent = 20")
    for home in (20, 21):
        app.db.insert("homes", id=home, address="Oak Way", agent="the agent")
    app.db.insert("tours", buyer="somebody", home_id=20, day="Monday", hour=11)
    yield app
    app.db.close()


def test_a_loan_is_paid_back_in_equal_months(app: App) -> None:
    """100,000 at 6% over 30 years: 500 / (1 - 1.005 ** -360) = 599.55."""
    loan = {"price_k": 125, "down_k": 25, "years": 30}
    assert zillow.toolkit.call(app, "get_mortgage", loan) == {"percent": 6, "monthly": 600}


def test_a_loan_needs_a_minimum_down_payment(app: App) -> None:
    with pytest.raises(ToolError, match=r"^down_k is 24; give at least 25 and less than 125$"):
        zillow.toolkit.call(app, "get_mortgage", {"price_k": 125, "down_k": 24, "years": 30})


def test_an_agent_shows_one_home_at_a_time(app: App) -> None:
    tour = {"home_id": 21, "day": "Monday", "hour": 11}
    with pytest.raises(ToolError, match=r"on Monday at 11; next free hour: 12$"):
        zillow.toolkit.call(app, "plan_tour", tour)
    zillow.toolkit.call(app, "plan_tour", tour | {"hour": 12})


def test_planning_a_tour_again_moves_it(app: App) -> None:
    for hour in (13, 14):
        tour = {"home_id": 21, "day": "Monday", "hour": hour}
        zillow.toolkit.call(app, "plan_tour", tour)
    assert app.db.column("select hour from tours where buyer = ?", app.user) == [14]
