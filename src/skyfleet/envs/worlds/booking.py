"""Booking: hotels, their rooms, one guest's stays and the hotels saved for later."""

from __future__ import annotations

from random import Random
from typing import Literal

from skyfleet.envs.worlds import wording
from skyfleet.envs.worlds.database import Row
from skyfleet.envs.worlds.toolkit import App, ToolError, check_known
from skyfleet.envs.worlds.world import Draft, World, call
from skyfleet.tasks.task import RecordedCall

booking = World(
    "booking",
    """
    create table hotels (id integer primary key, name text, city text, rating integer);
    create table rooms (id integer primary key, hotel_id integer, kind text, price integer);
    create table bookings (
        id integer primary key, room_id integer, guest text, day text, status text, booked_on text
    );
    create table saved_properties (guest text, hotel_id integer, primary key (guest, hotel_id));
    """,
)


@booking.seeder
def fill(app: App, rng: Random) -> None:
    names = iter(rng.sample(wording.HOTEL_NAMES.of(app.family), 12))
    hotel_ids = iter(rng.sample(range(1, 13), 12))
    room_ids = iter(rng.sample(range(1, 37), 36))
    for city in rng.sample(wording.CITIES, 3):
        for rating in rng.sample(range(50, 100), rng.randint(3, 4)):
            house = {"id": next(hotel_ids), "name": next(names), "city": city}
            hotel = app.db.insert("hotels", **house, rating=rating)
            kinds = rng.sample(wording.ROOM_KINDS, 3)
            for kind, price in zip(kinds, rng.sample(range(40, 100), 3), strict=True):
                app.db.insert("rooms", id=next(room_ids), hotel_id=hotel, kind=kind, price=price)
    rooms = app.db.rows("select id, hotel_id from rooms")
    others = [name for name in wording.PEOPLE if name != app.user]
    own = iter(rng.sample(app.db.column("select id from hotels"), 3))
    own_days = rng.sample(wording.DAYS, 3)
    for day in wording.DAYS:
        taken = {room["id"] for room in rng.sample(rooms, 9)}
        if day in own_days:
            hotel = next(own)
            room = rng.choice([room["id"] for room in rooms if room["hotel_id"] == hotel])
            taken.discard(room)
            _insert_booking(app, room, app.user, day)
        for room in sorted(taken):
            _insert_booking(app, room, rng.choice(others), day)
    for guest in others[:3]:
        hotel = rng.choice(app.db.column("select id from hotels"))
        app.db.insert("saved_properties", guest=guest, hotel_id=hotel)


@booking.reads
def list_hotels(app: App, city: str) -> list[Row]:
    """List hotels of a city, best first."""
    check_known("city", city, app.db.column("select distinct city from hotels order by city"))
    return app.db.rows(
        "select name, id, rating from hotels where city = ? order by rating desc", city
    )


@booking.reads
def list_rooms(app: App, hotel_id: int) -> list[Row]:
    """List rooms of a hotel, cheapest first."""
    _hotel(app, hotel_id)
    return app.db.rows(
        "select kind, id, price from rooms where hotel_id = ? order by price", hotel_id
    )


@booking.reads
def list_bookings(app: App) -> list[Row]:
    """List your bookings."""
    return app.db.rows(
        "select name as hotel, day, bookings.id, kind from bookings"
        " join rooms on rooms.id = room_id join hotels on hotels.id = hotel_id"
        " where guest = ? and status = 'active' order by bookings.id",
        app.user,
    )


@booking.writes
def create_booking(app: App, room_id: int, day: wording.Day) -> Row:
    """Book a room."""
    _check_free(app, room_id, day)
    return {"id": _insert_booking(app, room_id, app.user, day)}


@booking.writes
def update_booking(
    app: App,
    booking_id: int,
    day: wording.Day | None = None,
    status: Literal["cancelled"] | None = None,
) -> None:
    """Move or cancel a booking."""
    sql = "select * from bookings where id = ? and guest = ? and status = 'active'"
    stay = app.db.row(sql, booking_id, app.user)
    if stay is None:
        raise ToolError(f"no booking {booking_id} of yours; list_bookings shows them")
    if (day is None) == (status is None):
        raise ToolError("give either day or status")
    if day is not None:
        _check_free(app, stay["room_id"], day)
        app.db.write("update bookings set day = ? where id = ?", day, booking_id)
    else:
        app.db.write("update bookings set status = ? where id = ?", status, booking_id)


@booking.writes
def save_hotel(app: App, hotel_id: int) -> None:
    """Save a hotel for later."""
    _hotel(app, hotel_id)
    sql = "select * from saved_properties where guest = ? and hotel_id = ?"
    if app.db.row(sql, app.user, hotel_id):
        raise ToolError(f"hotel {hotel_id} is already saved")
    app.db.insert("saved_properties", guest=app.user, hotel_id=hotel_id)


def _insert_booking(app: App, room_id: int, guest: str, day: wording.Day) -> int:
    stay = {"room_id": room_id, "guest": guest, "day": day, "status": "active"}
    return app.db.insert("bookings", **stay, booked_on=app.current_date)


def _hotel(app: App, hotel_id: int) -> None:
    if app.db.row("select * from hotels where id = ?", hotel_id) is None:
        raise ToolError(f"no hotel {hotel_id}; list_hotels shows the ids")


def _free_rooms(app: App, hotel_id: int, day: str) -> list[Row]:
    """The rooms of a hotel that nobody has on that day, cheapest first."""
    return app.db.rows(
        "select * from rooms where hotel_id = ? and id not in"
        " (select room_id from bookings where day = ? and status = 'active') order by price",
        hotel_id,
        day,
    )


def _check_free(app: App, room_id: int, day: wording.Day) -> None:
    room = app.db.row("select * from rooms where id = ?", room_id)
    if room is None:
        raise ToolError(f"no room {room_id}; list_rooms shows the ids")
    free = [room["id"] for room in _free_rooms(app, room["hotel_id"], day)]
    if room_id not in free:
        others = ", ".join(map(str, free)) or "none"
        raise ToolError(f"room {room_id} is taken on {day}; free, cheapest first: {others}")


def _any_hotel(app: App, rng: Random) -> Row:
    return rng.choice(app.db.rows("select * from hotels"))


def _hotels(app: App, rng: Random) -> tuple[str, list[Row]]:
    """A city and its hotels, best first."""
    city = rng.choice(app.db.column("select distinct city from hotels"))
    return city, app.db.rows("select * from hotels where city = ? order by rating desc", city)


def _cheapest_if_free(app: App, hotel: Row, day: str) -> Row | None:
    room = app.db.row("select * from rooms where hotel_id = ? order by price", hotel["id"])
    return room if room in _free_rooms(app, hotel["id"], day) else None


def _look_up_rooms(hotel: Row) -> list[RecordedCall]:
    return [call("list_hotels", city=hotel["city"]), call("list_rooms", hotel_id=hotel["id"])]


def _cancel(stay: Row) -> list[RecordedCall]:
    cancelled = call("update_booking", booking_id=stay["id"], status="cancelled")
    return [call("list_bookings"), cancelled]


@booking.template(difficulty=1)
def act_on_id(app: App, rng: Random) -> Draft | None:
    if rng.random() < 0.3:
        hotel_id = _any_hotel(app, rng)["id"]
        prompts = [f"Save hotel {hotel_id}.", f"I like hotel {hotel_id}. Save it for later."]
        return Draft(prompts=prompts, calls=[call("save_hotel", hotel_id=hotel_id)])
    room_id, day = rng.choice(app.db.column("select id from rooms")), rng.choice(wording.DAYS)
    if app.db.row("select * from bookings where room_id = ? and day = ?", room_id, day):
        return None
    prompts = [f"Book room {room_id} for {day}.", f"I need room {room_id} on {day}. Book it."]
    return Draft(prompts=prompts, calls=[call("create_booking", room_id=room_id, day=day)])


@booking.template(difficulty=1)
def save_best_rated(app: App, rng: Random) -> Draft:
    city, hotels = _hotels(app, rng)
    end, hotel = rng.choice([("best", hotels[0]), ("worst", hotels[-1])])
    prompts = [
        f"Save the {end} rated hotel in {city}.",
        f"Which hotel in {city} is rated {end}? Save it.",
        f"Save the hotel of {city} with the {end} rating.",
    ]
    calls = [call("list_hotels", city=city), call("save_hotel", hotel_id=hotel["id"])]
    return Draft(prompts=prompts, calls=calls)


@booking.template(difficulty=3)
def book_by_kind(app: App, rng: Random) -> Draft | None:
    hotel, day = _any_hotel(app, rng), rng.choice(wording.DAYS)
    room = rng.choice(app.db.rows("select * from rooms where hotel_id = ?", hotel["id"]))
    free = _free_rooms(app, hotel["id"], day)
    if not free:
        return None
    kind, place = room["kind"], f"{hotel['name']} in {hotel['city']}"
    prompts = [
        f"Book the {kind} at {place} for {day}. If taken, the cheapest free room.",
        f"I want the {kind} of {place} on {day}, or else its cheapest free room.",
    ]
    calls = [*_look_up_rooms(hotel), call("create_booking", room_id=room["id"], day=day)]
    if room in free:
        return Draft(prompts=prompts, calls=calls)
    calls.append(call("create_booking", room_id=free[0]["id"], day=day))
    return Draft(prompts=prompts, calls=calls, expected_errors=1)


@booking.template(difficulty=2)
def book_cheapest(app: App, rng: Random) -> Draft | None:
    hotel, day = _any_hotel(app, rng), rng.choice(wording.DAYS)
    room = _cheapest_if_free(app, hotel, day)
    if room is None:
        return None
    place = f"{hotel['name']} in {hotel['city']}"
    prompts = [
        f"Book the cheapest room at {place} for {day}.",
        f"I need a room at {place} on {day}. Take the cheapest.",
    ]
    calls = [*_look_up_rooms(hotel), call("create_booking", room_id=room["id"], day=day)]
    return Draft(prompts=prompts, calls=calls)


@booking.template(difficulty=1)
def cancel_booking(app: App, rng: Random) -> Draft:
    stay = rng.choice(list_bookings(app))
    prompts = [
        f"Cancel my booking at {stay['hotel']}.",
        f"Cancel my {stay['day']} booking.",
        f"I cannot go to {stay['hotel']} on {stay['day']}. Cancel it.",
    ]
    return Draft(prompts=prompts, calls=_cancel(stay))


@booking.template(difficulty=2)
def move_booking(app: App, rng: Random) -> Draft | None:
    stay, day = rng.choice(list_bookings(app)), rng.choice(wording.DAYS)
    room = app.db.column("select room_id from bookings where id = ?", stay["id"])[0]
    if app.db.row("select * from bookings where room_id = ? and day = ?", room, day):
        return None
    prompts = [
        f"Move my booking at {stay['hotel']} to {day}.",
        f"Move my {stay['day']} booking to {day}.",
    ]
    calls = [call("list_bookings"), call("update_booking", booking_id=stay["id"], day=day)]
    return Draft(prompts=prompts, calls=calls)


@booking.template(difficulty=2)
def price_of_room(app: App, rng: Random) -> Draft:
    hotel = _any_hotel(app, rng)
    room = rng.choice(app.db.rows("select * from rooms where hotel_id = ?", hotel["id"]))
    prompts = [
        f"What does the {room['kind']} at {hotel['name']} in {hotel['city']} cost?",
        f"In {hotel['city']}, what is the price of the {room['kind']} at {hotel['name']}?",
    ]
    calls = _look_up_rooms(hotel)
    return Draft(prompts=prompts, calls=calls, answer=str(room["price"]), answer_kind="number")


@booking.template(difficulty=3)
def save_all_above(app: App, rng: Random) -> Draft | None:
    city, hotels = _hotels(app, rng)
    floor = rng.choice([60, 70, 80])
    good = sorted((h for h in hotels if h["rating"] > floor), key=lambda hotel: str(hotel["name"]))
    if not 2 <= len(good) <= 3:
        return None
    prompts = [
        f"Save every hotel in {city} rated above {floor}.",
        f"Save all hotels of {city} with a rating over {floor}.",
    ]
    calls = [call("list_hotels", city=city)]
    calls += [call("save_hotel", hotel_id=hotel["id"]) for hotel in good]
    return Draft(prompts=prompts, calls=calls)


@booking.template(difficulty=1, held_out=True)
def where_on_day(app: App, rng: Random) -> Draft:
    stay = rng.choice(list_bookings(app))
    prompts = [
        f"Which hotel have I booked for {stay['day']}?",
        f"Where do I stay on {stay['day']}?",
    ]
    calls = [call("list_bookings")]
    return Draft(prompts=prompts, calls=calls, answer=stay["hotel"], answer_kind="hotel")


@booking.template(difficulty=3, held_out=True)
def rebook(app: App, rng: Random) -> Draft | None:
    stay, hotel = rng.choice(list_bookings(app)), _any_hotel(app, rng)
    room = _cheapest_if_free(app, hotel, stay["day"])
    if room is None or hotel["name"] == stay["hotel"]:
        return None
    place = f"{hotel['name']} in {hotel['city']}"
    prompts = [
        f"Cancel my {stay['day']} booking. Book the cheapest room at {place} for that day.",
        f"On {stay['day']} I want the cheapest room at {place} instead of my booking.",
    ]
    booked = call("create_booking", room_id=room["id"], day=stay["day"])
    return Draft(prompts=prompts, calls=[*_cancel(stay), *_look_up_rooms(hotel), booked])
