"""Tools of the booking world, as one guest uses them."""

from __future__ import annotations

from datetime import date
from typing import Literal

from skyfleet.envs.tools import ToolError, check_known, shown
from skyfleet.worlds import vocabulary
from skyfleet.worlds.booking_stays import (
    book_room,
    cancel,
    check_card,
    check_free,
    next_date,
    pay_for_bookings,
)
from skyfleet.worlds.booking_tables import SAVED, SCHEMA, Amenity, fill
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import World

booking = World("booking", SCHEMA)
booking.seeder(fill)


@booking.reads
def list_hotels(app: App, city: str, amenity: Amenity | None = None) -> list[Row]:
    """List hotels of a city, best first."""
    check_known("city", city, app.db.column("select distinct city from hotels order by city"))
    return [
        {"name": hotel["name"], "id": hotel["id"], "rating": round(hotel["average_rating"] * 10)}
        for hotel in select_hotels(app, city, amenity)
    ]


@booking.reads
def get_hotel(app: App, name: str) -> Row:
    """Show a hotel and its rules."""
    hotel = app.db.row(
        "select id, city, check_in_from as check_in, pet_policy as pets,"
        " cancellation_policy_type as cancellation"
        " from hotels join property_policies on hotel_id = id where name = ?",
        name,
    )
    if hotel is None:
        raise ToolError(f"no hotel {shown(name)}; list_hotels shows the names")
    return hotel


@booking.reads
def list_rooms(app: App, hotel_id: int) -> list[Row]:
    """List rooms of a hotel, cheapest first."""
    _check_hotel(app, hotel_id)
    return app.db.rows(
        "select room_type as kind, id, base_price as price from rooms where hotel_id = ?"
        " order by base_price",
        hotel_id,
    )


@booking.reads
def list_bookings(app: App) -> list[Row]:
    """List your bookings."""
    stays = app.db.rows(
        "select hotels.name as hotel, check_in_date as day, bookings.id, room_type as kind"
        " from bookings join rooms on rooms.id = room_id join hotels on hotels.id = rooms.hotel_id"
        " where user_id = ? and status = 'confirmed' order by bookings.id",
        _user(app),
    )
    return [stay | {"day": f"{date.fromisoformat(stay['day']):%A}"} for stay in stays]


@booking.reads
def list_cards(app: App) -> list[Row]:
    """List your payment cards."""
    sql = "select card_type as card, id from payment_methods where user_id = ? order by id"
    return app.db.rows(sql, _user(app))


@booking.writes
def create_booking(app: App, room_id: int, day: vocabulary.Day, card_id: int | None = None) -> Row:
    """Book and pay for a room."""
    user = _user(app)
    check_free(app, room_id, day)
    if card_id is not None:
        check_card(app, user, card_id)
    booking_id = book_room(app, room_id, day, user=user, card_id=card_id)
    pay_for_bookings(app)
    return {"id": booking_id}


@booking.writes
def update_booking(
    app: App,
    booking_id: int,
    day: vocabulary.Day | None = None,
    status: Literal["cancelled"] | None = None,
) -> Row | None:
    """Move or cancel a booking."""
    sql = "select * from bookings where id = ? and user_id = ? and status = 'confirmed'"
    stay = app.db.row(sql, booking_id, _user(app))
    if stay is None:
        raise ToolError(f"no booking {booking_id} of yours; list_bookings shows them")
    if (day is None) == (status is None):
        raise ToolError("give either day or status")
    if day is None:
        return {"refund": cancel(app, booking_id)}
    check_free(app, stay["room_id"], day)
    check_in = next_date(app, day)
    app.db.write(
        "update bookings set check_in_date = ?, check_out_date = date(?, '+1 day') where id = ?",
        check_in,
        check_in,
        booking_id,
    )
    return None


@booking.writes
def save_hotel(app: App, hotel_id: int, wishlist: str = SAVED) -> None:
    """Save a hotel to a wishlist."""
    _check_hotel(app, hotel_id)
    user = _user(app)
    if wishlist in wishlists_with(app, hotel_id):
        raise ToolError(f"hotel {hotel_id} is already on {shown(wishlist)}")
    app.db.write("insert or ignore into wishlist_lists values (?, ?)", str(user), wishlist)
    saved = {"user_id": user, "hotel_id": hotel_id, "list_name": wishlist}
    app.db.insert("saved_properties", **saved, saved_at=app.current_date)


def _user(app: App) -> int:
    ids: list[int] = app.db.column("select id from users where first_name = ?", app.user)
    if not ids:
        raise ToolError(f"{shown(app.user)} has no account here")
    return ids[0]


def _check_hotel(app: App, hotel_id: int) -> None:
    if app.db.row("select * from hotels where id = ?", hotel_id) is None:
        raise ToolError(f"no hotel {hotel_id}; list_hotels shows the ids")


def wishlists_with(app: App, hotel_id: int) -> list[str]:
    sql = "select list_name from saved_properties where user_id = ? and hotel_id = ?"
    return app.db.column(sql, _user(app), hotel_id)


def select_hotels(app: App, city: str, amenity: str | None = None) -> list[Row]:
    """Return a city's hotels, best first; with an amenity, only those that have it."""
    return app.db.rows(
        "select * from hotels where city = ? and (? is null or id in (select hotel_id from"
        " hotel_amenities join amenities on id = amenity_id where name = ?))"
        " order by average_rating desc",
        city,
        amenity,
        amenity,
    )
