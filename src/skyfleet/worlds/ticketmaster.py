"""Ticketmaster: shows, their sections and seats, a cart, orders and tickets to transfer."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Annotated

from pydantic import Field

from skyfleet.envs.tools import ToolError, check_known
from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds import vocabulary
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft, World, call

ticketmaster = World(
    "ticketmaster",
    """
    create table venues (name text primary key);
    create table events (id integer primary key, name text, venue text, day text);
    create table sections (id integer primary key, event_id integer, name text, price integer);
    create table seats (
        section_id integer, number integer, owner text, order_id integer,
        primary key (section_id, number)
    );
    create table carts (
        section_id integer, number integer, user text, primary key (section_id, number)
    );
    create table orders (
        id integer primary key, user text, section_id integer, total integer, ordered_on text
    );
    create view free_seats as select section_id, number from seats
        left join carts using (section_id, number) where owner is null and user is null;
    """,
)

SEATS = range(1, 9)
"""Seat numbers of every section, in order."""

_BANDS = vocabulary.Names(
    ("Blue", "Wild", "Little", "Lost", "Happy", "Red", "Loud", "Slow"),
    ("Wolves", "Birds", "Kings", "Clouds", "Cats", "Boats", "Stars", "Bears"),
)
_VENUES = ("Arena", "Club", "Opera", "Park")
_SECTIONS = ("floor", "balcony", "box", "terrace")


@ticketmaster.seeder
def fill(app: App, rng: Random) -> None:
    bands = rng.sample(_BANDS.in_family(app.family), 6)  # Some play in both venues.
    ids, section_ids = iter(rng.sample(range(1, 7), 6)), iter(rng.sample(range(1, 19), 18))
    for venue in rng.sample(_VENUES, 2):
        app.db.insert("venues", name=venue)
        for band, day in zip(rng.sample(bands, 3), rng.sample(vocabulary.DAYS, 3), strict=True):
            event = app.db.insert("events", id=next(ids), name=band, venue=venue, day=day)
            prices = rng.sample(range(20, 100, 10), 3)
            for name, price in zip(rng.sample(_SECTIONS, 3), prices, strict=True):
                section = {"id": next(section_ids), "event_id": event, "name": name}
                app.db.insert("sections", **section, price=price)
    others = [name for name in vocabulary.PEOPLE if name != app.user]
    own = rng.sample(range(1, 19), 3)
    for number in SEATS:
        app.db.write("insert into seats (section_id, number) select id, ? from sections", number)
    for section_id in range(1, 19):
        if section_id in own:
            first = rng.randint(2, 5)
            _sell(app, app.user, section_id, range(first, first + rng.randint(2, 3)))
        for name in rng.sample(others, 2):
            free, first = _free_seats(app, section_id), rng.choice(SEATS)
            if wanted := [seat for seat in (first, first + 1) if seat in free]:
                _sell(app, name, section_id, wanted)
        held = rng.choice(_free_seats(app, section_id))
        app.db.insert("carts", section_id=section_id, number=held, user=rng.choice(others))


@ticketmaster.reads
def list_shows(app: App, venue: str) -> list[Row]:
    """List shows."""
    check_known("venue", venue, app.db.column("select name from venues order by name"))
    return app.db.rows("select name, id, day from events where venue = ? order by id", venue)


@ticketmaster.reads
def list_sections(app: App, show_id: int) -> list[Row]:
    """List sections."""
    sections = app.db.rows(
        "select name, id, price, (select count(*) from free_seats where section_id = id) as free"
        " from sections where event_id = ? order by id",
        show_id,
    )
    if not sections:
        raise ToolError(f"no show {show_id}; list_shows shows the ids")
    return sections


@ticketmaster.reads
def get_seats(app: App, section_id: int) -> str:
    """Show free seats."""
    _price(app, section_id)
    return f"free: {_format_seats(_free_seats(app, section_id))}"


@ticketmaster.writes
def hold_seats(
    app: App, section_id: int, first_seat: int, count: Annotated[int, Field(ge=1, le=4)] = 1
) -> Row:
    """Put adjacent seats into your cart."""
    price, free = _price(app, section_id), _free_seats(app, section_id)
    for number in range(first_seat, first_seat + count):
        if number not in free:
            raise ToolError(f"seat {number} is not free; free: {_format_seats(free)}")
        app.db.insert("carts", section_id=section_id, number=number, user=app.user)
    sql = "select section_id from carts where user = ? and section_id != ?"
    if app.db.row(sql, app.user, section_id):
        raise ToolError("your cart has seats of another section; checkout first")
    return {"price": price * count}


@ticketmaster.writes
def checkout(app: App) -> Row:
    """Buy what your cart holds."""
    held = app.db.rows("select * from carts where user = ? order by number", app.user)
    if not held:
        raise ToolError("your cart is empty; hold_seats first")
    app.db.write("delete from carts where user = ?", app.user)
    numbers = [seat["number"] for seat in held]
    return {"order_id": _sell(app, app.user, held[0]["section_id"], numbers)}


@ticketmaster.reads
def list_orders(app: App) -> list[Row]:
    """List your orders."""
    return app.db.rows(
        "select events.name as show, venue, orders.id, sections.id as section,"
        " group_concat(number, ' ') as seats from orders"
        " join sections on sections.id = orders.section_id join events on events.id = event_id"
        " join seats on order_id = orders.id and owner = user where user = ? group by orders.id",
        app.user,
    )


@ticketmaster.writes
def transfer_ticket(app: App, order_id: int, seat: int, to: str) -> None:
    """Give a ticket away."""
    check_known("user", to, vocabulary.PEOPLE)
    sql = "select number from seats where order_id = ? and owner = ? order by number"
    own = app.db.column(sql, order_id, app.user)
    if seat not in own:
        raise ToolError(
            f"seat {seat} of order {order_id} is not yours; yours: {_format_seats(own)}"
        )
    app.db.write("update seats set owner = ? where order_id = ? and number = ?", to, order_id, seat)


def _price(app: App, section_id: int) -> int:
    price = app.db.column("select price from sections where id = ?", section_id)
    if not price:
        raise ToolError(f"no section {section_id}; list_sections shows the ids")
    return int(price[0])


def _free_seats(app: App, section_id: int) -> list[int]:
    sql = "select number from free_seats where section_id = ? order by number"
    return app.db.column(sql, section_id)


def _format_seats(seats: Sequence[int]) -> str:
    return " ".join(map(str, seats)) or "none"


def _sell(app: App, user: str, section_id: int, numbers: Sequence[int]) -> int:
    order = {"user": user, "section_id": section_id, "ordered_on": app.current_date}
    order_id = app.db.insert("orders", **order, total=_price(app, section_id) * len(numbers))
    for number in numbers:
        sql = "update seats set owner = ?, order_id = ? where section_id = ? and number = ?"
        app.db.write(sql, user, order_id, section_id, number)
    return order_id


def _find_adjacent(app: App, section: Row, count: int) -> int | None:
    """The lowest number of `count` adjacent free seats."""
    free = _free_seats(app, section["id"])
    runs = (seat for seat in free if all(seat + step in free for step in range(count)))
    return next(runs, None)


def _any_show(app: App, rng: Random) -> tuple[str, list[Row], list[RecordedCall]]:
    """A show's name and venue, its sections, cheapest first, and the calls that find them."""
    show = rng.choice(app.db.rows("select * from events"))
    sections = sorted(list_sections(app, show["id"]), key=lambda section: int(section["price"]))
    calls = [call("list_shows", venue=show["venue"]), call("list_sections", show_id=show["id"])]
    return f"'{show['name']}' at the {show['venue']}", sections, calls


def _any_order(app: App, rng: Random) -> tuple[str, Row, list[int]] | None:
    """An order's show and venue, the order and its seats; None if two orders match."""
    orders = list_orders(app)
    order = rng.choice(orders)
    if sum((one["show"], one["venue"]) == (order["show"], order["venue"]) for one in orders) > 1:
        return None
    return f"'{order['show']}' at the {order['venue']}", order, [*map(int, order["seats"].split())]


def _buy(section: Row, first: int, **count: int) -> list[RecordedCall]:
    held = call("hold_seats", section_id=section["id"], first_seat=first, **count)
    return [held, call("checkout")]


@ticketmaster.template(difficulty=1)
def day_of_show(app: App, rng: Random) -> TaskDraft:
    show = rng.choice(app.db.rows("select * from events"))
    place = f"'{show['name']}' at the {show['venue']}"
    prompts = [f"On which day is {place}?", f"When is the show {place}?"]
    calls = [call("list_shows", venue=show["venue"])]
    return TaskDraft(prompts=prompts, calls=calls, answer=show["day"], answer_kind="day")


@ticketmaster.template(difficulty=1)
def give_ticket(app: App, rng: Random) -> TaskDraft | None:
    if (found := _any_order(app, rng)) is None:
        return None
    show, order, seats = found
    friend = rng.choice([name for name in vocabulary.PEOPLE if name != app.user])
    end, seat = rng.choice([("lowest", min(seats)), ("highest", max(seats))])
    prompts = [
        f"Give {friend} my {end} seat for {show}.",
        f"{friend} gets my ticket for {show} with the {end} seat. Transfer it.",
    ]
    given = call("transfer_ticket", order_id=order["id"], seat=seat, to=friend)
    return TaskDraft(prompts=prompts, calls=[call("list_orders"), given])


@ticketmaster.template(difficulty=2)
def seat_or_next(app: App, rng: Random) -> TaskDraft | None:
    place, sections, calls = _any_show(app, rng)
    section, seat = rng.choice(sections), rng.choice(SEATS)
    free = [number for number in _free_seats(app, section["id"]) if number >= seat]
    if not free:
        return None
    prompts = [
        f"Buy seat {seat} in the {section['name']} of {place}. If taken, the next higher free seat.",
        f"I want seat {seat} in the {section['name']} of {place}, or else the next free one above.",
    ]
    bought = _buy(section, free[0])
    if free[0] == seat:
        return TaskDraft(prompts=prompts, calls=calls + bought)
    refused, _ = _buy(section, seat)
    return TaskDraft(prompts=prompts, calls=[*calls, refused, *bought], expected_errors=1)


@ticketmaster.template(difficulty=2)
def price_of_seats(app: App, rng: Random) -> TaskDraft:
    place, sections, calls = _any_show(app, rng)
    section, count = rng.choice(sections), rng.randint(2, 4)
    prompts = [
        f"How much do {count} seats in the {section['name']} of {place} cost in total?",
        f"What is the total price of {count} seats in the {section['name']} of {place}?",
    ]
    total = str(section["price"] * count)
    return TaskDraft(prompts=prompts, calls=calls, answer=total, answer_kind="number")


@ticketmaster.template(difficulty=2)
def buy_cheapest(app: App, rng: Random) -> TaskDraft | None:
    place, sections, calls = _any_show(app, rng)
    end, section = rng.choice([("cheapest", sections[0]), ("most expensive", sections[-1])])
    seat = _find_adjacent(app, section, 1)
    if seat is None:
        return None
    prompts = [
        f"Buy the lowest free seat in the {end} section of {place}.",
        f"I need a seat for {place}. Buy the lowest free one of the {end} section.",
    ]
    calls += [call("get_seats", section_id=section["id"]), *_buy(section, seat)]
    return TaskDraft(prompts=prompts, calls=calls)


@ticketmaster.template(difficulty=3)
def buy_within_budget(app: App, rng: Random) -> TaskDraft | None:
    place, sections, calls = _any_show(app, rng)
    count = rng.randint(2, 3)
    budget = rng.choice(sections)["price"] * count + 5
    for section in reversed(sections):
        if section["price"] * count > budget:
            continue
        calls.append(call("get_seats", section_id=section["id"]))
        if (first := _find_adjacent(app, section, count)) is not None:
            break
    else:
        return None
    prompts = [
        f"Buy {count} seats side by side for {place}, for at most {budget} in all:"
        " the most expensive section that has them, the lowest seats there.",
        f"I have {budget} for {count} seats side by side for {place}."
        " Buy the lowest ones in the most expensive section possible.",
    ]
    return TaskDraft(prompts=prompts, calls=[*calls, *_buy(section, first, count=count)])


@ticketmaster.template(difficulty=3)
def buy_and_share(app: App, rng: Random) -> TaskDraft | None:
    place, sections, calls = _any_show(app, rng)
    section, friend = rng.choice(sections), rng.choice(vocabulary.PEOPLE)
    first = _find_adjacent(app, section, 2)
    if first is None or friend == app.user:
        return None
    prompts = [
        f"Buy the lowest 2 seats side by side in the {section['name']} of {place}"
        f" and give {friend} the higher one.",
        f"{friend} and I want 2 seats side by side in the {section['name']} of {place}."
        f" Buy the lowest and transfer the higher one to {friend}.",
    ]
    order = app.db.column("select max(id) + 1 from orders")[0]
    given = call("transfer_ticket", order_id=order, seat=first + 1, to=friend)
    calls += [call("get_seats", section_id=section["id"]), *_buy(section, first, count=2), given]
    return TaskDraft(prompts=prompts, calls=calls)


@ticketmaster.template(difficulty=2, held_out=True)
def cheapest_with_free(app: App, rng: Random) -> TaskDraft | None:
    place, sections, calls = _any_show(app, rng)
    count = rng.randint(2, 5)
    fitting = [section["name"] for section in sections if section["free"] >= count]
    if not fitting or len(fitting) == len(sections):
        return None
    prompts = [
        f"Which is the cheapest section of {place} with at least {count} free seats?",
        f"We are {count} people. What is the cheapest section of {place} with so many free seats?",
    ]
    return TaskDraft(prompts=prompts, calls=calls, answer=fitting[0], answer_kind="section")


@ticketmaster.template(difficulty=3, held_out=True)
def buy_beside_mine(app: App, rng: Random) -> TaskDraft | None:
    if (found := _any_order(app, rng)) is None:
        return None
    show, order, seats = found
    free = _free_seats(app, order["section"])
    beside = [seat for seat in (min(seats) - 1, max(seats) + 1) if seat in free]
    if len(beside) != 1:
        return None
    prompts = [
        f"Buy the free seat right beside my seats for {show}.",
        f"A friend joins me for {show}. Buy one more seat next to mine.",
    ]
    calls = [call("list_orders"), call("get_seats", section_id=order["section"])]
    return TaskDraft(prompts=prompts, calls=calls + _buy({"id": order["section"]}, beside[0]))
