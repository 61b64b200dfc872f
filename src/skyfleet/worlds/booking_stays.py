"""Rules of a stay: which rooms are free, and how a room is booked, paid for, cancelled, refunded."""

from __future__ import annotations

from datetime import date, timedelta

from skyfleet.envs.tools import ToolError
from skyfleet.worlds import vocabulary
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App

_REFUND_PERCENT = {"Flexible": 100, "Moderate": 50, "Strict": 0}

_BOOK = """
insert into bookings (
    booking_reference, user_id, hotel_id, room_id, check_in_date, check_out_date, booking_date,
    base_price, total_price, original_price, guest_first_name, guest_last_name, guest_email,
    guest_phone_number, guest_country, payment_method_id, agreed_to_terms_at
)
select printf('BK%04d', (select count(*) + 1 from bookings)), users.id, hotel_id, rooms.id,
    ?, date(?, '+1 day'), ?, base_price, base_price, base_price, first_name, last_name, email,
    phone_number, country,
    coalesce(?, (select id from payment_methods where user_id = users.id and is_default)), ?
from rooms, users where rooms.id = ? and users.id = ?
"""

_PAY = """
insert into transactions (booking_id, payment_method_id, amount, processed_at)
select id, payment_method_id, total_price, ? from bookings
where id not in (select booking_id from transactions)
"""

_REFUND = """
insert into transactions (booking_id, payment_method_id, amount, transaction_type, processed_at)
select id, payment_method_id, ?, 'Refund', ? from bookings where id = ?
"""


def next_date(app: App, day: vocabulary.Day) -> str:
    """Return the next such day after today. On a Monday, Monday is a week ahead."""
    today = date.fromisoformat(app.current_date)
    days_ahead = (vocabulary.DAYS.index(day) - today.weekday() - 1) % 7 + 1
    return (today + timedelta(days=days_ahead)).isoformat()


def free_rooms(app: App, hotel_id: int, day: vocabulary.Day) -> list[Row]:
    """Return the rooms of a hotel that are free on that day, cheapest first."""
    return app.db.rows(
        "select * from rooms where hotel_id = ? and id not in (select room_id from bookings"
        " where check_in_date = ? and status = 'confirmed') order by base_price",
        hotel_id,
        next_date(app, day),
    )


def check_free(app: App, room_id: int, day: vocabulary.Day) -> None:
    room = app.db.row("select * from rooms where id = ?", room_id)
    if room is None:
        raise ToolError(f"no room {room_id}; list_rooms shows the ids")
    free = [room["id"] for room in free_rooms(app, room["hotel_id"], day)]
    if room_id not in free:
        others = ", ".join(map(str, free)) or "none"
        raise ToolError(f"room {room_id} is taken on {day}; free, cheapest first: {others}")


def check_card(app: App, user: int, card_id: int) -> None:
    sql = "select * from payment_methods where id = ? and user_id = ?"
    if app.db.row(sql, card_id, user) is None:
        raise ToolError(f"no card {card_id} of yours; list_cards shows them")
    if has_expired(app, card_id):
        raise ToolError(f"card {card_id} has expired; pay with another")


def has_expired(app: App, card_id: int) -> bool:
    sql = "select printf('%d-%02d', expiry_year, expiry_month) from payment_methods where id = ?"
    month: str = app.db.column(sql, card_id)[0]
    return month < app.current_date[:7]


def book_room(
    app: App, room_id: int, day: vocabulary.Day, *, user: int, card_id: int | None = None
) -> int:
    """Insert a booking, to be paid with the user's default card unless `card_id` is given."""
    day_in, today = next_date(app, day), app.current_date
    values = (day_in, day_in, today, card_id, today, room_id, user)
    return app.db.connection.execute(_BOOK, values).lastrowid or 0


def pay_for_bookings(app: App) -> None:
    """Pay for every booking that is not yet paid for."""
    app.db.write(_PAY, app.current_date)


def compute_refund(app: App, booking_id: int) -> int:
    """Return how much of the price the hotel's cancellation policy pays back."""
    price, policy = app.db.connection.execute(
        "select total_price, cancellation_policy_type"
        " from bookings join property_policies using (hotel_id) where id = ?",
        (booking_id,),
    ).fetchone()
    return int(price * _REFUND_PERCENT[policy] // 100)


def cancel(app: App, booking_id: int) -> int:
    """Cancel a booking and return the refund."""
    refund = compute_refund(app, booking_id)
    app.db.write("update bookings set status = 'cancelled' where id = ?", booking_id)
    if refund:
        sql = "update bookings set payment_status = 'refunded' where id = ?"
        app.db.write(sql, booking_id)
        app.db.write(_REFUND, refund, app.current_date, booking_id)
    return refund
