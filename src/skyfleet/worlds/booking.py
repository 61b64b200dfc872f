"""Booking: task templates for one guest's hotels, rooms, stays, cards and wishlists.

The tools are in booking_tools.py, the tables in booking_tables.py, the booking rules in
booking_stays.py.
"""

from __future__ import annotations

from random import Random

from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds import vocabulary
from skyfleet.worlds.booking_stays import compute_refund, free_rooms, has_expired
from skyfleet.worlds.booking_tables import AMENITIES, WISHLISTS
from skyfleet.worlds.booking_tools import (
    booking,
    get_hotel,
    list_bookings,
    list_cards,
    select_hotels,
    wishlists_with,
)
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft, call

__all__ = ["booking"]


def _any_city(app: App, rng: Random) -> str:
    cities: list[str] = app.db.column("select distinct city from hotels")
    return rng.choice(cities)


def _any_hotel(app: App, rng: Random) -> Row:
    return rng.choice(app.db.rows("select * from hotels"))


def _any_room(app: App, rng: Random, hotel: Row) -> Row:
    return rng.choice(app.db.rows("select * from rooms where hotel_id = ?", hotel["id"]))


def _cheapest_if_free(app: App, hotel: Row, day: vocabulary.Day) -> Row | None:
    room = app.db.row("select * from rooms where hotel_id = ? order by base_price", hotel["id"])
    return room if room in free_rooms(app, hotel["id"], day) else None


def _own_stay(app: App, rng: Random) -> Row | None:
    """A booking whose day and hotel identify it; None if the first part of a composed task made
    another one with the same day or hotel."""
    stays = list_bookings(app)
    stay = rng.choice(stays)
    alike = sum(one["day"] == stay["day"] or one["hotel"] == stay["hotel"] for one in stays)
    return stay if alike == 1 else None


def _look_up_rooms(hotel: Row) -> list[RecordedCall]:
    return [call("list_hotels", city=hotel["city"]), call("list_rooms", hotel_id=hotel["id"])]


def _cancel(stay: Row) -> list[RecordedCall]:
    cancelled = call("update_booking", booking_id=stay["id"], status="cancelled")
    return [call("list_bookings"), cancelled]


@booking.template(difficulty=1)
def act_on_id(app: App, rng: Random) -> TaskDraft | None:
    hotel = _any_hotel(app, rng)
    if rng.random() < 0.3:
        prompts = [f"Save hotel {hotel['id']}.", f"I like hotel {hotel['id']}. Save it for later."]
        return TaskDraft(prompts=prompts, calls=[call("save_hotel", hotel_id=hotel["id"])])
    room, day = _any_room(app, rng, hotel), rng.choice(vocabulary.DAYS)
    if room not in free_rooms(app, hotel["id"], day):
        return None
    prompts = [f"Book room {room['id']} for {day}.", f"I need room {room['id']} on {day}. Book it."]
    return TaskDraft(prompts=prompts, calls=[call("create_booking", room_id=room["id"], day=day)])


@booking.template(difficulty=1)
def save_best_rated(app: App, rng: Random) -> TaskDraft:
    city = _any_city(app, rng)
    hotels = select_hotels(app, city)
    end, hotel = rng.choice([("best", hotels[0]), ("worst", hotels[-1])])
    prompts = [
        f"Save the {end} rated hotel in {city}.",
        f"Which hotel in {city} is rated {end}? Save it.",
        f"Save the hotel of {city} with the {end} rating.",
    ]
    calls = [call("list_hotels", city=city), call("save_hotel", hotel_id=hotel["id"])]
    return TaskDraft(prompts=prompts, calls=calls)


@booking.template(difficulty=3)
def book_by_kind(app: App, rng: Random) -> TaskDraft | None:
    hotel, day = _any_hotel(app, rng), rng.choice(vocabulary.DAYS)
    room, free = _any_room(app, rng, hotel), free_rooms(app, hotel["id"], day)
    if not free:
        return None
    kind, place = room["room_type"], f"{hotel['name']} in {hotel['city']}"
    prompts = [
        f"Book the {kind} at {place} for {day}. If taken, the cheapest free room.",
        f"I want the {kind} of {place} on {day}, or else its cheapest free room.",
    ]
    calls = [*_look_up_rooms(hotel), call("create_booking", room_id=room["id"], day=day)]
    if room in free:
        return TaskDraft(prompts=prompts, calls=calls)
    calls.append(call("create_booking", room_id=free[0]["id"], day=day))
    return TaskDraft(prompts=prompts, calls=calls, expected_errors=1)


@booking.template(difficulty=2)
def book_cheapest(app: App, rng: Random) -> TaskDraft | None:
    hotel, day = _any_hotel(app, rng), rng.choice(vocabulary.DAYS)
    room = _cheapest_if_free(app, hotel, day)
    if room is None:
        return None
    place = f"{hotel['name']} in {hotel['city']}"
    prompts = [
        f"Book the cheapest room at {place} for {day}.",
        f"I need a room at {place} on {day}. Take the cheapest.",
    ]
    calls = [*_look_up_rooms(hotel), call("create_booking", room_id=room["id"], day=day)]
    return TaskDraft(prompts=prompts, calls=calls)


@booking.template(difficulty=1)
def cancel_booking(app: App, rng: Random) -> TaskDraft | None:
    stay = _own_stay(app, rng)
    if stay is None:
        return None
    prompts = [
        f"Cancel my booking at {stay['hotel']}.",
        f"Cancel my {stay['day']} booking.",
        f"I cannot go to {stay['hotel']} on {stay['day']}. Cancel it.",
    ]
    return TaskDraft(prompts=prompts, calls=_cancel(stay))


@booking.template(difficulty=2)
def move_booking(app: App, rng: Random) -> TaskDraft | None:
    stay, day = _own_stay(app, rng), rng.choice(vocabulary.DAYS)
    if stay is None:
        return None
    sql = "select rooms.* from rooms join bookings on room_id = rooms.id where bookings.id = ?"
    (room,) = app.db.rows(sql, stay["id"])
    if room not in free_rooms(app, room["hotel_id"], day):
        return None
    prompts = [
        f"Move my booking at {stay['hotel']} to {day}.",
        f"Move my {stay['day']} booking to {day}.",
    ]
    calls = [call("list_bookings"), call("update_booking", booking_id=stay["id"], day=day)]
    return TaskDraft(prompts=prompts, calls=calls)


@booking.template(difficulty=2)
def price_of_room(app: App, rng: Random) -> TaskDraft:
    hotel = _any_hotel(app, rng)
    room = _any_room(app, rng, hotel)
    prompts = [
        f"What does the {room['room_type']} at {hotel['name']} in {hotel['city']} cost?",
        f"In {hotel['city']}, what is the price of the {room['room_type']} at {hotel['name']}?",
    ]
    price = str(room["base_price"])
    return TaskDraft(
        prompts=prompts, calls=_look_up_rooms(hotel), answer=price, answer_kind="number"
    )


@booking.template(difficulty=2)
def refund_of_booking(app: App, rng: Random) -> TaskDraft | None:
    stay = _own_stay(app, rng)
    if stay is None:
        return None
    prompts = [
        f"Cancel my {stay['day']} booking. How much do I get back?",
        f"I cannot go to {stay['hotel']}. Cancel it and say how much is paid back.",
    ]
    refund = str(compute_refund(app, stay["id"]))
    return TaskDraft(prompts=prompts, calls=_cancel(stay), answer=refund, answer_kind="number")


@booking.template(difficulty=2)
def pay_by_card(app: App, rng: Random) -> TaskDraft | None:
    hotel, day = _any_hotel(app, rng), rng.choice(vocabulary.DAYS)
    room = _any_room(app, rng, hotel)
    if room not in free_rooms(app, hotel["id"], day):
        return None
    first, second = rng.sample(list_cards(app), 2)
    kinds = f"my {first['card']}, or with my {second['card']} if it has expired"
    prompts = [
        f"Book room {room['id']} for {day} with {kinds}.",
        f"I need room {room['id']} on {day}. Pay with {kinds}.",
    ]
    paid = [
        call("create_booking", room_id=room["id"], day=day, card_id=card["id"])
        for card in (first, second)
    ]
    if not has_expired(app, first["id"]):
        return TaskDraft(prompts=prompts, calls=[call("list_cards"), paid[0]])
    return TaskDraft(prompts=prompts, calls=[call("list_cards"), *paid], expected_errors=1)


@booking.template(difficulty=2)
def rule_of_hotel(app: App, rng: Random) -> TaskDraft:
    name = _any_hotel(app, rng)["name"]
    rules = get_hotel(app, name)
    rule, question, kind = rng.choice(
        [
            ("check_in", f"From when can I check in at {name}?", "time"),
            ("pets", f"Are pets allowed or forbidden at {name}?", "word"),
            ("cancellation", f"Which kind of cancellation does {name} have?", "word"),
        ]
    )
    calls = [call("get_hotel", name=name)]
    return TaskDraft(prompts=[question], calls=calls, answer=rules[rule], answer_kind=kind)


@booking.template(difficulty=3)
def save_all_with(app: App, rng: Random) -> TaskDraft | None:
    city, amenity, wishlist = _any_city(app, rng), rng.choice(AMENITIES), rng.choice(WISHLISTS)
    fitting = sorted(select_hotels(app, city, amenity), key=lambda hotel: str(hotel["name"]))
    saved = any(wishlist in wishlists_with(app, hotel["id"]) for hotel in fitting)
    if saved or not 2 <= len(fitting) <= 3:
        return None
    prompts = [
        f"Save every hotel in {city} that has a {amenity} to my wishlist {wishlist}.",
        f"Put all hotels of {city} with a {amenity} on the wishlist {wishlist}.",
    ]
    calls = [call("list_hotels", city=city, amenity=amenity)]
    calls += [call("save_hotel", hotel_id=hotel["id"], wishlist=wishlist) for hotel in fitting]
    return TaskDraft(prompts=prompts, calls=calls)


@booking.template(difficulty=1, held_out=True)
def where_on_day(app: App, rng: Random) -> TaskDraft | None:
    stay = _own_stay(app, rng)
    if stay is None:
        return None
    prompts = [
        f"Which hotel have I booked for {stay['day']}?",
        f"Where do I stay on {stay['day']}?",
    ]
    calls = [call("list_bookings")]
    return TaskDraft(prompts=prompts, calls=calls, answer=stay["hotel"], answer_kind="hotel")


@booking.template(difficulty=2, held_out=True)
def check_in_on_day(app: App, rng: Random) -> TaskDraft | None:
    stay = _own_stay(app, rng)
    if stay is None:
        return None
    prompts = [
        f"From when can I check in on {stay['day']}?",
        f"When does check in begin at my {stay['day']} hotel?",
    ]
    time = get_hotel(app, stay["hotel"])["check_in"]
    calls = [call("list_bookings"), call("get_hotel", name=stay["hotel"])]
    return TaskDraft(prompts=prompts, calls=calls, answer=time, answer_kind="time")


@booking.template(difficulty=3, held_out=True)
def rebook(app: App, rng: Random) -> TaskDraft | None:
    stay, hotel = _own_stay(app, rng), _any_hotel(app, rng)
    if stay is None:
        return None
    room = _cheapest_if_free(app, hotel, stay["day"])
    if room is None or hotel["name"] == stay["hotel"]:
        return None
    place = f"{hotel['name']} in {hotel['city']}"
    prompts = [
        f"Cancel my {stay['day']} booking. Book the cheapest room at {place} for that day.",
        f"On {stay['day']} I want the cheapest room at {place} instead of my booking.",
    ]
    booked = call("create_booking", room_id=room["id"], day=stay["day"])
    return TaskDraft(prompts=prompts, calls=[*_cancel(stay), *_look_up_rooms(hotel), booked])
