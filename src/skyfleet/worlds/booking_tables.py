"""Tables of the booking world and their seed data.

The tables have every column that Fleet's public booking verifiers read, so that those verifiers run
here and return a score. Column defaults fill what no tool sets.
"""

from __future__ import annotations

from random import Random
from typing import Literal, get_args

from skyfleet.worlds import vocabulary
from skyfleet.worlds.booking_stays import book_room, pay_for_bookings
from skyfleet.worlds.toolkit import App

Amenity = Literal["pool", "gym", "spa", "sauna", "bar", "terrace"]
AMENITIES: tuple[Amenity, ...] = get_args(Amenity)
CARDS = ("Visa", "Mastercard", "Discover")
WISHLISTS = ("Summer", "Winter", "Family", "Honeymoon", "Someday")
SAVED = "Saved"
"""The wishlist that every user has."""

SCHEMA = """
create table users (
    id integer primary key, first_name text, last_name text, email text, phone_number text,
    country text, phone text, date_of_birth text
);
create table payment_methods (
    id integer primary key, user_id integer, card_type text, card_number text, last_four text,
    cvv text, expiry_month integer, expiry_year integer, cardholder_name text,
    billing_address text, billing_postal_code text, is_default integer,
    is_saved_for_reuse integer default 1, created_at text
);
create table hotels (
    id integer primary key, name text, property_type text, star_rating integer,
    average_rating real, total_reviews integer, address text, city text, country text,
    is_active integer default 1, created_at text
);
create table property_policies (
    hotel_id integer primary key, check_in_from text, pet_policy text, smoking_policy text,
    cancellation_policy_type text
);
create table amenities (id integer primary key, name text, category text default 'Leisure');
create table hotel_amenities (
    hotel_id integer, amenity_id integer, primary key (hotel_id, amenity_id)
);
create table facilities (
    id integer primary key, hotel_id integer, name text, category text default 'General',
    description text, created_at text
);
create table nearby_attractions (
    id integer primary key, hotel_id integer, name text, type text, distance_km real
);
create table hotel_images (id integer primary key, hotel_id integer, url text);
create table rooms (
    id integer primary key, hotel_id integer, name text, room_type text, base_price integer,
    view_type text, available_count integer default 1
);
create table bookings (
    id integer primary key, booking_reference text, user_id integer, hotel_id integer,
    room_id integer, check_in_date text, check_out_date text, booking_date text,
    adults integer default 1, children integer default 0, room_count integer default 1,
    base_price integer, taxes_fees integer default 0, total_price integer,
    currency text default 'USD', status text default 'confirmed',
    payment_status text default 'paid', special_requests text, arrival_time text,
    purpose_of_trip text default 'Leisure', guest_first_name text, guest_last_name text,
    guest_email text, guest_phone_country_code text default '+1', guest_phone_number text,
    guest_country text, booking_group_id integer, rooms_close_together integer default 0,
    payment_method_id integer, agreed_to_terms integer default 1, agreed_to_terms_at text,
    agreed_to_marketing integer default 0, agreed_to_marketing_at text,
    discount_percentage real default 0, discount_amount integer default 0,
    original_price integer, rewards_tier text, paperless_confirmation integer default 0,
    update_account_with_guest_details integer default 0, rate_plan_id integer, created_at text
);
create table cancellations (
    id integer primary key, booking_id integer, cancelled_by text, cancellation_date text,
    reason text, refund_amount real, penalty_amount real, refund_status text, notes text,
    created_at text
);
create table transactions (
    id integer primary key, booking_id integer, payment_method_id integer, amount integer,
    currency text default 'USD', transaction_type text default 'Payment',
    status text default 'Success', gateway_response text, gateway_transaction_id text,
    processed_at text
);
create table order_tokens (
    id integer primary key, token text, user_id integer, hotel_id integer, room_id integer,
    check_in_date text, check_out_date text, adults integer, children integer,
    room_count integer, base_price integer, taxes_fees integer, total_price integer,
    discount_amount integer, discount_percentage real, original_price integer,
    rewards_tier text, currency text, expires_at text, created_at text
);
create table wishlist_lists (user_id text, list_name text, primary key (user_id, list_name));
create table saved_properties (
    user_id integer, hotel_id integer, list_name text, notes text, saved_at text,
    primary key (user_id, hotel_id, list_name)
);
"""

_COUNTRIES = ("Portugal", "France", "Italy", "Norway", "Austria", "Greece")
_LAST_NAMES = ("Adams", "Brown", "Clark", "Davis", "Evans", "Foster", "Green", "Hughes")


def fill(app: App, rng: Random) -> None:
    _add_users(app, rng)
    _add_hotels(app, rng)
    _add_stays(app, rng)
    for user in range(1, len(vocabulary.PEOPLE) + 1):
        app.db.insert("wishlist_lists", user_id=str(user), list_name=SAVED)
    _save(app, rng, user=1, wishlist=rng.choice(WISHLISTS))
    for other in rng.sample(range(2, len(vocabulary.PEOPLE) + 1), 3):
        _save(app, rng, user=other, wishlist=SAVED)


def _add_users(app: App, rng: Random) -> None:
    """The logged-in user has id 1 and three cards, one of them expired."""
    others = [name for name in vocabulary.PEOPLE if name != app.user]
    card_ids = iter(rng.sample(range(1, 21), 10))
    year = int(app.current_date[:4])
    for name, last_name in zip([app.user, *others], _LAST_NAMES, strict=True):
        user = app.db.insert(
            "users",
            first_name=name,
            last_name=last_name,
            email=f"{name}@example.com",
            phone_number=f"555{rng.randrange(10**7):07}",
            country=rng.choice(_COUNTRIES),
        )
        kinds = rng.sample(CARDS, 3 if name == app.user else 1)
        for place, kind in enumerate(kinds):
            number = f"4{rng.randrange(10**15):015}"
            app.db.insert(
                "payment_methods",
                id=next(card_ids),
                user_id=user,
                card_type=kind,
                card_number=number,
                last_four=number[-4:],
                cvv=f"{rng.randrange(1000):03}",
                expiry_month=rng.randint(1, 12),
                expiry_year=year - 1 if place == 2 else year + rng.randint(1, 4),
                cardholder_name=name,
                is_default=int(place == 0),
            )


def _add_hotels(app: App, rng: Random) -> None:
    app.db.connection.executemany(
        "insert into amenities (name) values (?)", [(name,) for name in AMENITIES]
    )
    names = iter(rng.sample(vocabulary.HOTEL_NAMES.in_family(app.family), 12))
    hotel_ids = iter(rng.sample(range(1, 13), 12))
    room_ids = iter(rng.sample(range(1, 37), 36))
    for city in rng.sample(vocabulary.CITIES, 3):
        for rating in rng.sample(range(50, 100), rng.randint(3, 4)):
            hotel = app.db.insert(
                "hotels",
                id=next(hotel_ids),
                name=next(names),
                property_type=rng.choice(("Hotel", "Resort", "Villa", "Apartment")),
                star_rating=rating // 20 + 1,
                average_rating=rating / 10,
                total_reviews=rng.randint(20, 900),
                address=f"{rng.randint(1, 90)} Market Street",
                city=city,
                country=_COUNTRIES[vocabulary.CITIES.index(city)],
            )
            _furnish(app, rng, hotel)
            kinds = rng.sample(vocabulary.ROOM_KINDS, 3)
            for kind, price in zip(kinds, rng.sample(range(40, 100), 3), strict=True):
                room = next(room_ids)
                app.db.insert(
                    "rooms",
                    id=room,
                    hotel_id=hotel,
                    name=f"{kind}-{room}",
                    room_type=kind,
                    base_price=price,
                    view_type=rng.choice(("city", "garden", "courtyard")),
                )


def _furnish(app: App, rng: Random, hotel: int) -> None:
    app.db.insert(
        "property_policies",
        hotel_id=hotel,
        check_in_from=f"{rng.randint(12, 17)}:00",
        pet_policy=rng.choice(("Allowed", "Forbidden")),
        smoking_policy=rng.choice(("Allowed", "Forbidden")),
        cancellation_policy_type=rng.choice(("Flexible", "Moderate", "Strict")),
    )
    for amenity in rng.sample(range(1, len(AMENITIES) + 1), 3):
        app.db.insert("hotel_amenities", hotel_id=hotel, amenity_id=amenity)
    facility = rng.choice(("Parking", "Laundry", "Reception"))
    app.db.insert("facilities", hotel_id=hotel, name=facility)
    sight = rng.choice(("Museum", "Theatre", "Park"))
    distance_km = rng.randint(1, 40) / 10
    app.db.insert(
        "nearby_attractions", hotel_id=hotel, name=sight, type=sight, distance_km=distance_km
    )
    app.db.insert("hotel_images", hotel_id=hotel, url=f"/images/{hotel}.jpg")


def _add_stays(app: App, rng: Random) -> None:
    """Book nine rooms per day; the user has bookings on three days, at three hotels."""
    rooms = app.db.rows("select id, hotel_id from rooms")
    own = iter(rng.sample(app.db.column("select id from hotels"), 3))
    own_days = rng.sample(vocabulary.DAYS, 3)
    for day in vocabulary.DAYS:
        taken = {room["id"] for room in rng.sample(rooms, 9)}
        if day in own_days:
            hotel = next(own)
            room = rng.choice([room["id"] for room in rooms if room["hotel_id"] == hotel])
            taken.discard(room)
            book_room(app, room, day, user=1)
        for room in sorted(taken):
            book_room(app, room, day, user=rng.randint(2, len(vocabulary.PEOPLE)))
    pay_for_bookings(app)


def _save(app: App, rng: Random, *, user: int, wishlist: str) -> None:
    app.db.write("insert or ignore into wishlist_lists values (?, ?)", str(user), wishlist)
    app.db.insert(
        "saved_properties",
        user_id=user,
        hotel_id=rng.choice(app.db.column("select id from hotels")),
        list_name=wishlist,
        saved_at=app.current_date,
    )
