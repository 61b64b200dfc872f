"""Zillow: homes for sale, one buyer's saved homes and tours, and monthly loan payments."""

from __future__ import annotations

import math
from random import Random
from typing import Annotated, Literal, get_args

from pydantic import Field

from skyfleet.envs.tools import ToolError, check_known
from skyfleet.worlds import vocabulary
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft, World, call

zillow = World(
    "zillow",
    """
    create table homes (
        id integer primary key, address text, area text, price_k integer, beds integer,
        size_m2 integer, agent text
    );
    create table saved_homes (buyer text, home_id integer, primary key (buyer, home_id));
    create table tours (
        buyer text, home_id integer, day text, hour integer, primary key (buyer, home_id)
    );
    create table loans (years integer primary key, percent integer, least_down_percent integer);
    """,
)

_ADDRESSES = vocabulary.Names(
    ("Oak", "Elm", "Maple", "Cedar", "Pine", "Birch", "Rose", "Olive"),
    ("Street", "Road", "Lane", "Way", "Drive", "Hill", "Square", "Park"),
)

HOURS = range(10, 16)
Hour = Annotated[int, Field(ge=HOURS[0], le=HOURS[-1])]
Thousands = Annotated[int, Field(ge=0)]
Years = Literal[15, 30]
YEARS: tuple[Years, ...] = get_args(Years)


@zillow.seeder
def fill(app: App, rng: Random) -> None:
    others = rng.sample([name for name in vocabulary.PEOPLE if name != app.user], 6)
    agents, buyers = others[:3], others[3:]
    addresses = iter(rng.sample(_ADDRESSES.in_family(app.family), 15))
    ids = iter(rng.sample(range(1, 16), 15))
    for area in rng.sample(vocabulary.CITIES, 3):
        for price_k in rng.sample(range(150, 400, 10), rng.randint(4, 5)):
            home = {"id": next(ids), "address": next(addresses), "area": area, "price_k": price_k}
            rooms = {"beds": rng.randint(2, 3), "size_m2": rng.randrange(60, 160, 5)}
            app.db.insert("homes", **home, **rooms, agent=rng.choice(agents))
    homes = app.db.column("select id from homes")
    slots = iter(rng.sample([(day, hour) for day in vocabulary.DAYS for hour in HOURS], 18))
    for buyer in [*buyers, app.user]:
        for home_id in rng.sample(homes, 3 if buyer == app.user else 5):
            day, hour = next(slots)
            app.db.insert("tours", buyer=buyer, home_id=home_id, day=day, hour=hour)
    for buyer in buyers:
        app.db.insert("saved_homes", buyer=buyer, home_id=rng.choice(homes))
    for years in YEARS:
        terms = {"percent": rng.randint(3, 7), "least_down_percent": rng.choice([10, 20])}
        app.db.insert("loans", years=years, **terms)


@zillow.reads
def list_homes(app: App, area: str) -> list[Row]:
    """List homes of an area, cheapest first."""
    check_known("area", area, app.db.column("select distinct area from homes order by area"))
    columns = ("address", "id", "price_k", "beds")
    return [{name: home[name] for name in columns} for home in _homes(app, area)]


@zillow.reads
def get_home(app: App, home_id: int) -> Row:
    """Show a home."""
    home = _home(app, home_id)
    price = {"price_k": home["price_k"], "price_per_m2": _price_per_m2(home)}
    return {**price, "agent": home["agent"]}


@zillow.writes
def save_home(app: App, home_id: int) -> None:
    """Save a home."""
    _home(app, home_id)
    if home_id in _saved(app):
        raise ToolError(f"home {home_id} is already saved")
    app.db.insert("saved_homes", buyer=app.user, home_id=home_id)


@zillow.reads
def list_tours(app: App) -> list[Row]:
    """List your tours."""
    return app.db.rows(
        "select address, day, hour, home_id from tours join homes on homes.id = home_id"
        " where buyer = ? order by home_id",
        app.user,
    )


@zillow.writes
def plan_tour(app: App, home_id: int, day: vocabulary.Day, hour: Hour) -> None:
    """Plan or move a tour."""
    home = _home(app, home_id)
    free = _free_hours(app, home, day)
    if hour not in free:
        later = next((str(other) for other in free if other > hour), "none")
        busy = f"{home['agent']} or you have a tour on {day} at {hour}"
        raise ToolError(f"{busy}; next free hour: {later}")
    sql = "insert into tours (buyer, home_id, day, hour) values (?, ?, ?, ?)"
    sql += " on conflict do update set day = excluded.day, hour = excluded.hour"
    app.db.write(sql, app.user, home_id, day, hour)


@zillow.reads
def get_mortgage(app: App, price_k: Thousands, down_k: Thousands, years: Years) -> Row:
    """Work out what a loan costs monthly."""
    least_k = _least_down_k(app, price_k, years)
    if not least_k <= down_k < price_k:
        raise ToolError(f"down_k is {down_k}; give at least {least_k} and less than {price_k}")
    percent = app.db.column("select percent from loans where years = ?", years)[0]
    rate = percent / 1200
    monthly = (price_k - down_k) * 1000 * rate / (1 - (1 + rate) ** (-12 * years))
    return {"percent": percent, "monthly": round(monthly)}


def _home(app: App, home_id: int) -> Row:
    home = app.db.row("select * from homes where id = ?", home_id)
    if home is None:
        raise ToolError(f"no home {home_id}; list_homes shows the ids")
    return home


def _homes(app: App, area: str) -> list[Row]:
    return app.db.rows("select * from homes where area = ? order by price_k", area)


def _least_down_k(app: App, price_k: int, years: Years) -> int:
    terms = app.db.rows("select * from loans where years = ?", years)[0]
    return math.ceil(price_k * int(terms["least_down_percent"]) / 100)


def _price_per_m2(home: Row) -> int:
    return round(int(home["price_k"]) * 1000 / int(home["size_m2"]))


def _saved(app: App) -> list[int]:
    return app.db.column("select home_id from saved_homes where buyer = ?", app.user)


def _free_hours(app: App, home: Row, day: str) -> list[int]:
    """Hours in which neither the home's agent nor the user has another tour."""
    taken = app.db.column(
        "select hour from tours join homes on homes.id = home_id"
        " where day = ? and (buyer = ? or agent = ?) and not (buyer = ? and home_id = ?)",
        *(day, app.user, home["agent"], app.user, home["id"]),
    )
    return [hour for hour in HOURS if hour not in taken]


def _any_home(app: App, rng: Random) -> Row:
    return rng.choice(app.db.rows("select * from homes"))


def _any_search(app: App, rng: Random) -> tuple[str, list[Row]] | None:
    """A number of beds in an area, and the two or three matching homes, cheapest first."""
    home = _any_home(app, rng)
    found = [other for other in _homes(app, home["area"]) if other["beds"] == home["beds"]]
    if not 2 <= len(found) <= 3 or set(_saved(app)) & {other["id"] for other in found}:
        return None
    return f"with {home['beds']} beds in {home['area']}", found


def _only_tour_of_its_day(app: App, rng: Random) -> Row | None:
    tours = list_tours(app)
    days = [tour["day"] for tour in tours]
    alone = [tour for tour in tours if days.count(tour["day"]) == 1]
    return rng.choice(alone) if alone else None


@zillow.template(difficulty=1)
def save_by_price(app: App, rng: Random) -> TaskDraft | None:
    if (search := _any_search(app, rng)) is None:
        return None
    wanted, homes = search
    end, home = rng.choice([("cheapest", homes[0]), ("most expensive", homes[-1])])
    prompts = [f"Save the {end} home {wanted}.", f"Of the homes {wanted}, save the {end}."]
    calls = [call("list_homes", area=home["area"]), call("save_home", home_id=home["id"])]
    return TaskDraft(prompts=prompts, calls=calls)


@zillow.template(difficulty=1)
def agent_of_home(app: App, rng: Random) -> TaskDraft:
    home = _any_home(app, rng)
    address, area = home["address"], home["area"]
    prompts = [
        f"Who is the agent of '{address}' in {area}?",
        f"Which agent sells '{address}' in {area}?",
    ]
    calls = [call("list_homes", area=area), call("get_home", home_id=home["id"])]
    return TaskDraft(prompts=prompts, calls=calls, answer=home["agent"], answer_kind="name")


@zillow.template(difficulty=1)
def move_tour(app: App, rng: Random) -> TaskDraft | None:
    tour, day = _only_tour_of_its_day(app, rng), rng.choice(vocabulary.DAYS)
    if tour is None or tour["day"] == day:
        return None
    if tour["hour"] not in _free_hours(app, _home(app, tour["home_id"]), day):
        return None
    prompts = [
        f"Move my {tour['day']} tour to {day} at the same hour.",
        f"Move my tour of '{tour['address']}' to {day}, same hour.",
    ]
    moved = call("plan_tour", home_id=tour["home_id"], day=day, hour=tour["hour"])
    return TaskDraft(prompts=prompts, calls=[call("list_tours"), moved])


@zillow.template(difficulty=2)
def tour_or_later(app: App, rng: Random) -> TaskDraft | None:
    home, day, hour = _any_home(app, rng), rng.choice(vocabulary.DAYS), rng.choice(HOURS)
    free = _free_hours(app, home, day)
    later = [other for other in free if other > hour]
    # Most hours are free; the task is about the taken ones.
    if not later or (hour in free and rng.random() < 0.8):
        return None
    place = f"'{home['address']}' in {home['area']}"
    prompts = [
        f"Plan a tour of {place} on {day} at {hour}. If taken, the next free hour.",
        f"I want to see {place} on {day} at {hour}, or else at the next free hour.",
    ]
    hours = [hour] if hour in free else [hour, later[0]]
    calls = [call("list_homes", area=home["area"])]
    calls += [call("plan_tour", home_id=home["id"], day=day, hour=one) for one in hours]
    return TaskDraft(prompts=prompts, calls=calls, expected_errors=len(hours) - 1)


@zillow.template(difficulty=2)
def monthly_payment(app: App, rng: Random) -> TaskDraft:
    home, down_k = _any_home(app, rng), rng.choice([20, 30, 40])
    years, place = rng.choice(YEARS), f"'{home['address']}' in {home['area']}"
    prompts = [
        f"What does {place} cost a month over {years} years with {down_k} thousand down, "
        "or more if the bank wants more?",
        f"I pay {down_k} thousand down for {place}, or as much as the bank wants. "
        f"What is the monthly cost over {years} years?",
    ]
    price_k, calls = home["price_k"], [call("list_homes", area=home["area"])]
    asked = sorted({down_k, max(down_k, _least_down_k(app, price_k, years))})
    calls += [call("get_mortgage", price_k=price_k, down_k=one, years=years) for one in asked]
    return TaskDraft(
        prompts=prompts,
        calls=calls,
        answer=str(get_mortgage(app, price_k, asked[-1], years)["monthly"]),
        answer_kind="number",
        expected_errors=len(asked) - 1,
    )


@zillow.template(difficulty=3)
def save_best_value(app: App, rng: Random) -> TaskDraft | None:
    if (search := _any_search(app, rng)) is None:
        return None
    wanted, homes = search
    best, second = sorted(homes, key=_price_per_m2)[:2]
    if _price_per_m2(best) == _price_per_m2(second):
        return None
    prompts = [
        f"Of the homes {wanted}, save the one with the lowest price per m2.",
        f"Save the home {wanted} that costs the least per m2.",
    ]
    calls = [call("list_homes", area=best["area"])]
    calls += [call("get_home", home_id=home["id"]) for home in homes]
    return TaskDraft(prompts=prompts, calls=[*calls, call("save_home", home_id=best["id"])])


@zillow.template(difficulty=3)
def save_affordable(app: App, rng: Random) -> TaskDraft | None:
    area, down_k, years = _any_home(app, rng)["area"], rng.choice([80, 90]), rng.choice(YEARS)
    tried = _homes(app, area)[-rng.randint(2, 3) :][::-1]
    monthly = [get_mortgage(app, home["price_k"], down_k, years)["monthly"] for home in tried]
    limit = (monthly[-1] // 50 + 1) * 50
    if monthly[-2] <= limit or tried[-1]["id"] in _saved(app):
        return None
    loan = f"with {down_k} thousand down over {years} years"
    prompts = [
        f"Save the most expensive home in {area} that costs at most {limit} a month {loan}.",
        f"I can pay {limit} a month {loan}. Save the most expensive home in {area} within that.",
    ]
    calls = [call("list_homes", area=area)]
    calls += [
        call("get_mortgage", price_k=home["price_k"], down_k=down_k, years=years) for home in tried
    ]
    return TaskDraft(prompts=prompts, calls=[*calls, call("save_home", home_id=tried[-1]["id"])])


@zillow.template(difficulty=2, held_out=True)
def price_of_toured(app: App, rng: Random) -> TaskDraft | None:
    if (tour := _only_tour_of_its_day(app, rng)) is None:
        return None
    price_k = _home(app, tour["home_id"])["price_k"]
    prompts = [
        f"What is the price in thousands of the home I tour on {tour['day']}?",
        f"On {tour['day']} I tour a home. What does it cost in thousands?",
    ]
    calls = [call("list_tours"), call("get_home", home_id=tour["home_id"])]
    return TaskDraft(prompts=prompts, calls=calls, answer=str(price_k), answer_kind="number")


@zillow.template(difficulty=3, held_out=True)
def save_toured_with(app: App, rng: Random) -> TaskDraft | None:
    toured = [tour["home_id"] for tour in list_tours(app)]
    agent = _home(app, rng.choice(toured))["agent"]
    wanted = [home_id for home_id in toured if _home(app, home_id)["agent"] == agent]
    if len(wanted) == len(toured) or set(wanted) & set(_saved(app)):
        return None
    prompts = [
        f"Save every home I tour whose agent is {agent}.",
        f"{agent} is the agent of some homes I tour. Save those.",
    ]
    calls = [call("list_tours")]
    calls += [call("get_home", home_id=home_id) for home_id in toured]
    calls += [call("save_home", home_id=home_id) for home_id in wanted]
    return TaskDraft(prompts=prompts, calls=calls)
