"""Tables and seeded data of the doordash world."""

from __future__ import annotations

from random import Random

from skyfleet.worlds.conversations.people import sample_names
from skyfleet.worlds.toolkit import App

SCHEMA = """
create table customers (id text primary key, name text, phone text unique, email text,
    refunds_last_30_days integer);
create table addresses (id text primary key, customer_id text, label text, street text, zone text);
create table restaurants (id text primary key, name text, cuisine text, zone text);
create table menu_items (id text primary key, restaurant_id text, name text, price_cents integer,
    is_alcohol integer);
create table dashers (id text primary key, name text);
create table orders (id text primary key, customer_id text, restaurant_id text, address_id text,
    dasher_id text, status text, eta text, late_minutes integer, hours_ago integer,
    tip_dollars integer, promo text, late_credit integer);
create table order_items (order_id text, item_id text, quantity integer,
    primary key (order_id, item_id));
create table promos (code text primary key, percent integer, minimum_cents integer);
create table customer_promos (customer_id text, code text, primary key (customer_id, code));
create table item_refunds (id integer primary key, order_id text, item_id text, quantity integer,
    amount_cents integer);
create table order_refunds (id integer primary key, order_id text, percent integer,
    amount_cents integer);
create table credits (id integer primary key, customer_id text, order_id text, dollars integer);
create table verifications (id integer primary key, customer_id text, day text);
"""

_ZONES = ("A", "B", "C")
_LABELS = ("home", "office", "gym")
_STREETS = ("Oak", "Pine", "Elm", "Lake", "Hill", "Mill", "Church", "Bridge")
_RESTAURANTS = (
    ("Golden Wok", "Chinese", ("Fried Rice", "Spring Rolls", "Mapo Tofu", "Hot Soup")),
    ("Casa Verde", "Mexican", ("Burrito", "Taco Plate", "Nachos", "Corn Salad")),
    ("Napoli Corner", "Italian", ("Margherita", "Lasagna", "Tiramisu", "Minestrone")),
    ("Green Bowl", "Salads", ("Caesar Salad", "Lentil Bowl", "Fruit Cup", "Falafel")),
    ("Burger Barn", "American", ("Cheeseburger", "Fries", "Milkshake", "Veggie Burger")),
    ("Tokyo Garden", "Japanese", ("Ramen", "Sushi Set", "Gyoza", "Miso Soup")),
)
_ALCOHOL = {"Italian": "Red Wine", "American": "Beer", "Japanese": "Sake", "Mexican": "Tequila"}
_PROMOS = (("SAVE10", 10, 2000), ("FEAST20", 20, 4500), ("LUNCH15", 15, 3000))
_STATUSES = ("placed", "placed", "preparing", "picked_up", "delivered", "delivered")
_N_CUSTOMERS = 6


def fill(app: App, rng: Random) -> None:
    for code, percent, minimum in _PROMOS:
        app.db.insert("promos", code=code, percent=percent, minimum_cents=minimum)
    ids = rng.sample(range(1000, 9999), 200)
    _fill_restaurants(app, rng, ids)
    names = sample_names(app, rng, _N_CUSTOMERS + 3)
    dashers = [f"D{ids.pop()}" for _ in range(3)]
    for dasher_id in dashers:
        app.db.insert("dashers", id=dasher_id, name=names.pop().split()[0])
    for name in names:
        customer_id = f"C{ids.pop()}"
        first, last = name.lower().split()
        app.db.insert(
            "customers",
            id=customer_id,
            name=name,
            phone=f"555-{ids.pop()}",
            email=f"{first}.{last}@mail.com",
            refunds_last_30_days=rng.choice([0, 0, 1, 2, 3, 5]),
        )
        for code in rng.sample([code for code, *_ in _PROMOS], rng.choice([1, 2])):
            app.db.insert("customer_promos", customer_id=customer_id, code=code)
        addresses = [f"A{ids.pop()}" for _ in _LABELS]
        for address_id, label in zip(addresses, _LABELS, strict=True):
            app.db.insert(
                "addresses",
                id=address_id,
                customer_id=customer_id,
                label=label,
                street=f"{rng.randint(1, 99)} {rng.choice(_STREETS)} Street",
                zone=rng.choice(_ZONES),
            )
        restaurants = app.db.rows("select * from restaurants order by id")
        for restaurant in rng.sample(restaurants, 3):
            _add_order(app, rng, f"O{ids.pop()}", customer_id, restaurant["id"], addresses, dashers)


def _fill_restaurants(app: App, rng: Random, ids: list[int]) -> None:
    for name, cuisine, dishes in rng.sample(_RESTAURANTS, 5):
        restaurant_id = f"S{ids.pop()}"
        zone = rng.choice(_ZONES)
        app.db.insert("restaurants", id=restaurant_id, name=name, cuisine=cuisine, zone=zone)
        drinks = [_ALCOHOL[cuisine]] if cuisine in _ALCOHOL else []
        for dish in (*dishes, *drinks):
            app.db.insert(
                "menu_items",
                id=f"I{ids.pop()}",
                restaurant_id=restaurant_id,
                name=dish,
                price_cents=5 * rng.randint(60, 400),
                is_alcohol=int(dish in drinks),
            )


def _add_order(
    app: App,
    rng: Random,
    order_id: str,
    customer_id: str,
    restaurant_id: str,
    addresses: list[str],
    dashers: list[str],
) -> None:
    status = rng.choice(_STATUSES)
    is_delivered = status == "delivered"
    late = rng.choice([0, 0, 10, 35, 50, 75]) if is_delivered else 0
    app.db.insert(
        "orders",
        id=order_id,
        customer_id=customer_id,
        restaurant_id=restaurant_id,
        address_id=rng.choice(addresses),
        dasher_id=rng.choice(dashers) if status in ("picked_up", "delivered") else None,
        status=status,
        eta=None if is_delivered else f"{rng.randint(11, 22)}:{rng.randint(10, 59)}",
        late_minutes=late,
        hours_ago=rng.choice([3, 20, 40, 60, 90]) if is_delivered else 0,
        tip_dollars=rng.randint(1, 8),
        promo=rng.choice([None, None, None, "WELCOME"]),
        late_credit=0,
    )
    sql = "select id from menu_items where restaurant_id = ? order by id"
    items = app.db.column(sql, restaurant_id)
    for item_id in rng.sample(items, rng.choice([2, 3, 3])):
        app.db.insert(
            "order_items", order_id=order_id, item_id=item_id, quantity=rng.choice([1, 1, 2])
        )
