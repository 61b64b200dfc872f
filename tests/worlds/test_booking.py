"""Rules of the booking world: payments, refunds, cards and wishlists."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from skyfleet.envs.tools import ToolError
from skyfleet.worlds.booking import booking
from skyfleet.worlds.toolkit import App


@pytest.fixture
def app() -> Iterator[App]:
    app = booking.open(1, booking.variables(1) | {"CURRENT_DATE": "2026-03-04"})
    yield app
    app.db.close()


def _book(app: App) -> int:
    """Book room 1, after making it free and its price 75."""
    app.db.write("update rooms set base_price = 75 where id = 1")
    app.db.write("update bookings set status = 'cancelled' where room_id = 1")
    stay = booking.toolkit.call(app, "create_booking", {"room_id": 1, "day": "Friday"})
    assert isinstance(stay, dict)
    return int(stay["id"])


def test_a_stay_of_one_night_is_booked_and_paid_for_with_the_default_card(app: App) -> None:
    stay = app.db.row("select * from bookings where id = ?", _book(app)) or {}
    # The fourth of March 2026 is a Wednesday.
    assert (stay["check_in_date"], stay["check_out_date"]) == ("2026-03-06", "2026-03-07")
    assert (stay["total_price"], stay["guest_first_name"], len(stay)) == (75, app.user, 41)
    card = app.db.row("select id from payment_methods where user_id = 1 and is_default") or {}
    paid = app.db.row("select * from transactions where booking_id = ?", stay["id"]) or {}
    assert (paid["payment_method_id"], paid["amount"]) == (card["id"], 75)
    assert paid["transaction_type"] == "Payment"


@pytest.mark.parametrize(("policy", "refund"), [("Flexible", 75), ("Moderate", 37), ("Strict", 0)])
def test_a_refund_follows_the_hotels_policy(app: App, policy: str, refund: int) -> None:
    app.db.write("update property_policies set cancellation_policy_type = ?", policy)
    stay = _book(app)
    cancelled = {"booking_id": stay, "status": "cancelled"}
    assert booking.toolkit.call(app, "update_booking", cancelled) == {"refund": refund}
    sql = "select amount from transactions where booking_id = ? and transaction_type = 'Refund'"
    assert app.db.column(sql, stay) == ([refund] if refund else [])
    with pytest.raises(ToolError, match=f"no booking {stay} of yours"):
        booking.toolkit.call(app, "update_booking", cancelled)


def test_an_expired_card_and_another_guests_card_are_rejected(app: App) -> None:
    app.db.write("update bookings set status = 'cancelled' where room_id = 1")
    before = app.db.image()
    (expired,) = app.db.column("select id from payment_methods where expiry_year < 2026")
    (foreign, *_) = app.db.column("select id from payment_methods where user_id = 2")
    for card, complaint in ((expired, "has expired"), (foreign, "no card")):
        arguments = {"room_id": 1, "day": "Monday", "card_id": card}
        with pytest.raises(ToolError, match=complaint):
            booking.toolkit.call(app, "create_booking", arguments)
    assert app.db.image() == before


def test_a_hotel_is_saved_once_to_each_wishlist_and_a_new_one_is_made(app: App) -> None:
    app.db.write("delete from saved_properties")
    for arguments in ({"hotel_id": 2}, {"hotel_id": 2, "wishlist": "Alps"}):
        booking.toolkit.call(app, "save_hotel", arguments)
    with pytest.raises(ToolError, match="hotel 2 is already on 'Alps'"):
        booking.toolkit.call(app, "save_hotel", {"hotel_id": 2, "wishlist": "Alps"})
    sql = "select list_name from saved_properties where user_id = 1 order by list_name"
    assert app.db.column(sql) == ["Alps", "Saved"]
    assert "Alps" in app.db.column("select list_name from wishlist_lists where user_id = '1'")


def test_hotels_can_be_filtered_by_amenity(app: App) -> None:
    (city, *_) = app.db.column("select city from hotels")
    app.db.write("delete from hotel_amenities")
    assert booking.toolkit.call(app, "list_hotels", {"city": city, "amenity": "spa"}) == []
    hotels = booking.toolkit.call(app, "list_hotels", {"city": city})
    assert isinstance(hotels, list)
    app.db.insert("hotel_amenities", hotel_id=hotels[1]["id"], amenity_id=3)  # the third is the spa
    found = booking.toolkit.call(app, "list_hotels", {"city": city, "amenity": "spa"})
    assert found == [hotels[1]]


def test_an_unknown_user_has_no_account() -> None:
    app = booking.open(1, booking.variables(1) | {"LOGGED_IN_USER": "zoe"})
    with pytest.raises(ToolError, match="'zoe' has no account here"):
        booking.toolkit.call(app, "list_bookings", {})
    app.db.close()


def test_after_the_first_part_of_a_composed_task_no_instruction_is_ambiguous(app: App) -> None:
    """With two bookings on one day or at one hotel, `cancel my Friday booking` is ambiguous."""
    names = "cancel_booking move_booking refund_of_booking where_on_day check_in_on_day rebook"
    generators = [one.generate for one in booking.templates if one.name in names.split()]
    assert len(generators) == 6
    seeds = [f"{number}" for number in range(40)]
    assert all(any(generate(app, Random(seed)) for seed in seeds) for generate in generators)
    first, *others = app.db.rows("select * from bookings where user_id = 1")
    for twin in (
        {"check_in_date": first["check_in_date"], "check_out_date": first["check_out_date"]},
        {"room_id": first["room_id"], "hotel_id": first["hotel_id"]},
    ):
        with app.db.rollback_at_end():
            for stay in others:
                places = ", ".join(f"{name} = ?" for name in twin)
                sql = f"update bookings set {places} where id = ?"
                app.db.write(sql, *twin.values(), stay["id"])
            assert not any(generate(app, Random(seed)) for generate in generators for seed in seeds)
