"""Google Maps: places, the roads between them, their reviews, and lists of saved places."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random
from typing import Annotated, Literal, get_args

from pydantic import Field

from skyfleet.envs.tools import ToolError, shown
from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds import vocabulary
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft, World, call

google_maps = World(
    "google-maps",
    """
    create table places (
        name text primary key, kind text, rating integer, opens integer, closes integer
    );
    create table roads (a text, b text, minutes integer, primary key (a, b));
    create table reviews (place text, author text, stars integer, primary key (place, author));
    create table lists (owner text, name text, primary key (owner, name));
    create table saved_places (
        owner text, list text, place text, primary key (owner, list, place)
    );
    """,
)

Kind = Literal["cafe", "museum", "park", "bakery"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_NAMES = vocabulary.Names(
    ("Old", "Green", "Corner", "River", "Little", "North", "Blue", "Stone"),
    ("Mill", "Gate", "Bridge", "Yard", "Lane", "Square", "Well", "Hill"),
)
_LISTS = ("food", "weekend", "family", "holiday")


@google_maps.seeder
def fill(app: App, rng: Random) -> None:
    others = [name for name in vocabulary.PEOPLE if name != app.user]
    unused = iter(rng.sample(_NAMES.in_family(app.family), 16))
    for kind in KINDS:
        count = rng.randint(3, 4)
        spans = (range(25, 51), range(6, 13), range(16, 24))
        for values in zip(*(rng.sample(span, count) for span in spans), strict=True):
            facts = dict(zip(("rating", "opens", "closes"), values, strict=True))
            app.db.insert("places", name=next(unused), kind=kind, **facts)
    names = app.db.column("select name from places order by name")
    rng.shuffle(names)
    for number, name in enumerate(names):
        # One road to an earlier place makes every place reachable, a second makes detours.
        for other in rng.sample(names[:number], min(number, 2)):
            app.db.insert("roads", a=name, b=other, minutes=rng.randint(6, 20))
        for author in rng.sample(others, rng.randint(1, 3)):
            app.db.insert("reviews", place=name, author=author, stars=rng.randint(1, 5))
    for owner in (app.user, rng.choice(others)):
        for list_name in rng.sample(_LISTS, 2):
            app.db.insert("lists", owner=owner, name=list_name)
            for name in rng.sample(names, rng.randint(2, 3)):
                app.db.insert("saved_places", owner=owner, list=list_name, place=name)


@google_maps.reads
def list_places(app: App, kind: Kind) -> list[Row]:
    """List places."""
    sql = "select name, rating, opens, closes from places where kind = ? order by name"
    return app.db.rows(sql, kind)


@google_maps.reads
def list_nearby(app: App, place: str, kind: Kind) -> list[Row]:
    """List places, nearest first."""
    routes = _routes(app, place)
    names = app.db.column("select name from places where kind = ? and name != ?", kind, place)
    return [{"name": name, "minutes": way[0]} for name, way in routes.items() if name in names]


@google_maps.reads
def get_directions(app: App, start: str, goal: str) -> Row:
    """Find the fastest way."""
    _check_place(app, goal)
    minutes, stops = _routes(app, start)[goal]
    return {"minutes": minutes, "via": ", ".join(stops[1:-1]) or None}


@google_maps.reads
def list_reviews(app: App, place: str) -> list[Row]:
    """List reviews of a place."""
    _check_place(app, place)
    return app.db.rows("select author, stars from reviews where place = ? order by author", place)


@google_maps.writes
def create_review(app: App, place: str, stars: Annotated[int, Field(ge=1, le=5)]) -> None:
    """Rate a place."""
    if app.user in [review["author"] for review in list_reviews(app, place)]:
        raise ToolError(f"you have rated {place}; rate another")
    app.db.insert("reviews", place=place, author=app.user, stars=stars)


@google_maps.reads
def list_saved(app: App, list_name: str) -> list[Row]:
    """List saved places."""
    if list_name not in _lists(app):
        raise ToolError(f"you have no list {shown(list_name)}; create_list first")
    return app.db.rows(
        "select name, kind from saved_places join places on name = place"
        " where owner = ? and list = ? order by name",
        app.user,
        list_name,
    )


@google_maps.writes
def save_place(app: App, place: str, list_name: str) -> None:
    """Save a place in a list."""
    _check_place(app, place)
    if place in _saved(app, list_name):
        raise ToolError(f"{place} is in {list_name} already; save another")
    app.db.insert("saved_places", owner=app.user, list=list_name, place=place)


@google_maps.writes
def create_list(app: App, name: str) -> None:
    """Create a list."""
    if name in _lists(app):
        raise ToolError(f"you have a list {shown(name)}; save_place uses it")
    app.db.insert("lists", owner=app.user, name=name)


def _check_place(app: App, name: str) -> None:
    if not app.db.row("select * from places where name = ?", name):
        raise ToolError(f"no place {shown(name)}; list_places shows their names")


def _lists(app: App) -> list[str]:
    return app.db.column("select name from lists where owner = ? order by name", app.user)


def _saved(app: App, list_name: str) -> list[str]:
    return [place["name"] for place in list_saved(app, list_name)]


def _routes(app: App, start: str) -> dict[str, tuple[int, list[str]]]:
    """Minutes and stops of the fastest route to every place, nearest first (Dijkstra)."""
    _check_place(app, start)
    roads = app.db.rows("select a, b, minutes from roads union select b, a, minutes from roads")
    found: dict[str, tuple[int, list[str]]] = {}
    waiting = [(0, [start])]
    while waiting:
        minutes, stops = heappop(waiting)
        if stops[-1] in found:
            continue
        found[stops[-1]] = minutes, stops
        for road in roads:
            if road["a"] == stops[-1]:
                heappush(waiting, (minutes + road["minutes"], [*stops, road["b"]]))
    return found


def _any_place(app: App, rng: Random, *, not_a: Kind | None = None) -> Row:
    return rng.choice(app.db.rows("select * from places where kind is not ?", not_a))


def _pick_superlative(app: App, rng: Random) -> tuple[str, str, list[RecordedCall]]:
    """A superlative that one place has among its kind, its name, and the call that shows it."""
    kind = rng.choice(KINDS)
    end, column, sign = rng.choice(
        [("is rated best", "rating", 1), ("opens last", "opens", 1), ("closes first", "closes", -1)]
    )
    place = max(list_places(app, kind), key=lambda place: sign * int(place[column]))
    return f"the {kind} that {end}", place["name"], [call("list_places", kind=kind)]


def _draft_saving(
    app: App, prompts: Sequence[str], calls: Sequence[RecordedCall], place: str, list_name: str
) -> TaskDraft | None:
    """The calls that save a place; without such a list, the error of the first call says so.

    None if the place is already saved there.
    """
    saved = call("save_place", place=place, list_name=list_name)
    if list_name not in _lists(app):
        calls = [*calls, saved, call("create_list", name=list_name), saved]
        return TaskDraft(prompts=prompts, calls=calls, expected_errors=1)
    if place in _saved(app, list_name):
        return None
    return TaskDraft(prompts=prompts, calls=[*calls, saved])


@google_maps.template(difficulty=1)
def save_one(app: App, rng: Random) -> TaskDraft | None:
    (which, place, calls), list_name = _pick_superlative(app, rng), rng.choice(_lists(app))
    prompts = [
        f"Save {which} in my list {list_name}.",
        f"My list {list_name} lacks {which}. Save it.",
    ]
    return _draft_saving(app, prompts, calls, place, list_name)


@google_maps.template(difficulty=1)
def hours_of(app: App, rng: Random) -> TaskDraft:
    place, deed = _any_place(app, rng), rng.choice(["open", "close"])
    name, kind = place["name"], place["kind"]
    prompts = [f"When does the {kind} {name} {deed}?", f"{name} is a {kind}. When does it {deed}?"]
    calls, hour = [call("list_places", kind=kind)], str(place[f"{deed}s"])
    return TaskDraft(prompts=prompts, calls=calls, answer=hour, answer_kind="hour")


@google_maps.template(difficulty=1)
def minutes_between(app: App, rng: Random) -> TaskDraft:
    start, goal = rng.sample(app.db.column("select name from places"), 2)
    prompts = [
        f"How many minutes is it from {start} to {goal}?",
        f"I am at {start}. How many minutes is it to {goal}?",
    ]
    calls, minutes = [call("get_directions", start=start, goal=goal)], _routes(app, start)[goal][0]
    return TaskDraft(prompts=prompts, calls=calls, answer=str(minutes), answer_kind="number")


@google_maps.template(difficulty=2)
def copy_stars(app: App, rng: Random) -> TaskDraft:
    which, place, calls = _pick_superlative(app, rng)
    review = rng.choice(list_reviews(app, place))
    author, stars = review["author"], review["stars"]
    prompts = [
        f"Give {which} as many stars as {author} did.",
        f"I agree with {author} about {which}. Give it the same stars.",
    ]
    calls += [call("list_reviews", place=place), call("create_review", place=place, stars=stars)]
    return TaskDraft(prompts=prompts, calls=calls)


@google_maps.template(difficulty=2)
def save_nearest(app: App, rng: Random) -> TaskDraft | None:
    kind, list_name = rng.choice(KINDS), rng.choice(_LISTS)
    start = _any_place(app, rng, not_a=kind)["name"]
    first, second, *_ = list_nearby(app, start, kind)
    if first["minutes"] == second["minutes"]:
        return None
    prompts = [
        f"Save the {kind} nearest to {start} in my list {list_name}.",
        f"I am at {start}. Save the nearest {kind} in my list {list_name}.",
    ]
    calls = [call("list_nearby", place=start, kind=kind)]
    return _draft_saving(app, prompts, calls, first["name"], list_name)


@google_maps.template(difficulty=3)
def save_nearest_good(app: App, rng: Random) -> TaskDraft | None:
    kind, list_name = rng.choice(KINDS), rng.choice(_LISTS)
    start = _any_place(app, rng, not_a=kind)["name"]
    floor, hour = rng.choice([30, 35, 40]), rng.randint(16, 21)
    sql = "select name from places where rating > ? and closes > ?"
    good, near = app.db.column(sql, floor, hour), list_nearby(app, start, kind)
    fitting = [place for place in near if place["name"] in good]
    ties = len({place["minutes"] for place in near}) < len(near)
    if ties or not fitting or fitting[0] == near[0]:
        return None
    prompts = [
        f"Save in my list {list_name} the {kind} nearest to {start}"
        f" that is rated above {floor} and closes after {hour}.",
        f"I am at {start}. Save the nearest {kind} that closes after {hour}"
        f" and is rated above {floor} in my list {list_name}.",
    ]
    calls = [call("list_nearby", place=start, kind=kind), call("list_places", kind=kind)]
    return _draft_saving(app, prompts, calls, fitting[0]["name"], list_name)


@google_maps.template(difficulty=3)
def build_list(app: App, rng: Random) -> TaskDraft:
    list_name = rng.choice([name for name in _LISTS if name not in _lists(app)])
    kinds = rng.sample(KINDS, rng.randint(2, 3))
    wanted = f"{', '.join(kinds[:-1])} and {kinds[-1]}"
    prompts = [
        f"Make a list {list_name} of the best rated {wanted}.",
        f"I need a new list {list_name} with the {wanted} that are rated best.",
    ]
    calls = [call("list_places", kind=kind) for kind in kinds]
    calls.append(call("create_list", name=list_name))
    for kind in kinds:
        best = max(list_places(app, kind), key=lambda place: int(place["rating"]))["name"]
        calls.append(call("save_place", place=best, list_name=list_name))
    return TaskDraft(prompts=prompts, calls=calls)


@google_maps.template(difficulty=3)
def nearest_saved(app: App, rng: Random) -> TaskDraft | None:
    start, list_name = _any_place(app, rng)["name"], rng.choice(_lists(app))
    saved, routes = _saved(app, list_name), _routes(app, start)
    first, *rest = sorted(routes[place][0] for place in saved)
    nearest = min(saved, key=lambda place: routes[place][0])
    if start in saved or first in rest or not 2 <= len(saved) <= 3:
        return None
    prompts = [
        f"Which place in my list {list_name} is nearest to {start}?",
        f"I am at {start}. Which place in my list {list_name} is nearest?",
    ]
    calls = [call("list_saved", list_name=list_name)]
    calls += [call("get_directions", start=start, goal=place) for place in saved]
    return TaskDraft(prompts=prompts, calls=calls, answer=nearest, answer_kind="name")


@google_maps.template(difficulty=3, held_out=True)
def minutes_of_trip(app: App, rng: Random) -> TaskDraft | None:
    which, stop, calls = _pick_superlative(app, rng)
    start, goal = rng.sample(app.db.column("select name from places"), 2)
    if stop in (start, goal):
        return None
    prompts = [
        f"How many minutes is it in total from {start} to {which} and on to {goal}?",
        f"I go from {start} to {goal} and visit {which} on the way. How many minutes in total?",
    ]
    ways = [(start, stop), (stop, goal)]
    calls += [call("get_directions", start=one, goal=other) for one, other in ways]
    total = sum(_routes(app, one)[other][0] for one, other in ways)
    return TaskDraft(prompts=prompts, calls=calls, answer=str(total), answer_kind="number")


@google_maps.template(difficulty=2, held_out=True)
def rate_saved(app: App, rng: Random) -> TaskDraft:
    list_name, stars = rng.choice(_lists(app)), rng.randint(1, 5)
    prompts = [
        f"Give every place in my list {list_name} {stars} stars.",
        f"Rate all that I saved in {list_name}: {stars} stars each.",
    ]
    calls = [call("list_saved", list_name=list_name)]
    calls += [call("create_review", place=name, stars=stars) for name in _saved(app, list_name)]
    return TaskDraft(prompts=prompts, calls=calls)
