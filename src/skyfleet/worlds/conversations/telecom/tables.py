"""Tables and seeded data of the telecom world."""

from __future__ import annotations

from datetime import date, timedelta
from random import Random

from skyfleet.worlds.conversations.people import sample_names
from skyfleet.worlds.toolkit import App

SCHEMA = """
create table customers (id text primary key, name text unique, pin text, area text,
    customer_years integer, months_since_waiver integer);
create table plans (id text primary key, name text, monthly_cents integer, data_gb integer);
create table lines (number text primary key, customer_id text, plan_id text, status text,
    months_left integer, used_gb integer);
create table devices (line text primary key, model text, installments_left integer, locked integer);
create table addons (id text primary key, name text, monthly_cents integer);
create table line_addons (line text, addon_id text, primary key (line, addon_id));
create table bills (id text primary key, customer_id text, month text, amount_cents integer,
    late_fee_cents integer, due text, status text);
create table cards (id text primary key, customer_id text, kind text, is_expired integer);
create table payments (id integer primary key, bill_id text, card_id text, amount_cents integer);
create table credits (id integer primary key, customer_id text, kind text, dollars integer);
create table outages (id text primary key, area text, status text, hours integer,
    expected_end text);
create table tickets (id integer primary key, line text, problem text, opened text);
create table verifications (id integer primary key, customer_id text, day text);
"""

AREAS = ("North", "South", "East", "West", "Harbor", "Old Town")
PLANS = (
    ("P5", "Mini", 1500, 5),
    ("P20", "Basic", 2500, 20),
    ("P50", "Plus", 4000, 50),
    ("P99", "Max", 6000, 100),
)
ADDONS = (
    ("A1", "Roaming", 1000),
    ("A2", "Music", 500),
    ("A3", "Insurance", 800),
    ("A4", "Data Boost", 700),
)
CARD_KINDS = ("Visa", "Mastercard", "Amex")
_MODELS = ("Nova 5", "Nova 6", "Pixel Go", "Lite X", "Ultra 2")
_N_CUSTOMERS = 7


def fill(app: App, rng: Random) -> None:
    for plan_id, name, cents, data in PLANS:
        app.db.insert("plans", id=plan_id, name=name, monthly_cents=cents, data_gb=data)
    for addon_id, name, cents in ADDONS:
        app.db.insert("addons", id=addon_id, name=name, monthly_cents=cents)
    _fill_outages(app, rng)
    numbers = rng.sample(range(1000, 9999), 3 * _N_CUSTOMERS)
    ids = rng.sample(range(100, 999), 5 * _N_CUSTOMERS)
    for name in sample_names(app, rng, _N_CUSTOMERS):
        customer_id = f"C{ids.pop()}"
        app.db.insert(
            "customers",
            id=customer_id,
            name=name,
            pin=str(rng.randint(1000, 9999)),
            area=rng.choice(AREAS),
            customer_years=rng.choice([0, 0, 1, 2, 3, 5]),
            months_since_waiver=rng.choice([None, None, 3, 7, 11, 14, 20]),
        )
        for _ in range(rng.choice([1, 2, 2, 3])):
            _fill_line(app, rng, customer_id, f"555-{numbers.pop()}")
        _fill_bills(app, rng, customer_id, [f"B{ids.pop()}" for _ in range(2)])
        kinds = rng.sample(CARD_KINDS, 2)
        expired = rng.choice([None, None, 0, 1])
        for index, kind in enumerate(kinds):
            app.db.insert(
                "cards",
                id=f"K{ids.pop()}",
                customer_id=customer_id,
                kind=kind,
                is_expired=int(index == expired),
            )


def _fill_outages(app: App, rng: Random) -> None:
    today = date.fromisoformat(app.current_date)
    for index, area in enumerate(rng.sample(AREAS, 5)):
        is_open = index < 2
        end = today + timedelta(days=rng.randint(1, 3))
        app.db.insert(
            "outages",
            id=f"O{rng.randint(100, 999)}{index}",
            area=area,
            status="open" if is_open else "ended",
            hours=rng.randint(2, 120),
            expected_end=end.isoformat() if is_open else None,
        )


def _fill_line(app: App, rng: Random, customer_id: str, number: str) -> None:
    plan_id, _, _, data = rng.choice(PLANS)
    app.db.insert(
        "lines",
        number=number,
        customer_id=customer_id,
        plan_id=plan_id,
        status="active",
        months_left=rng.choice([0, 0, 0, 2, 5, 9, 14]),
        used_gb=rng.randint(1, data),
    )
    app.db.insert(
        "devices",
        line=number,
        model=rng.choice(_MODELS),
        installments_left=rng.choice([0, 0, 0, 3, 8, 12]),
        locked=1,
    )
    for addon_id, *_ in rng.sample(ADDONS, rng.choice([0, 1, 1, 2])):
        app.db.insert("line_addons", line=number, addon_id=addon_id)


def _fill_bills(app: App, rng: Random, customer_id: str, ids: list[str]) -> None:
    today = date.fromisoformat(app.current_date)
    newest = rng.choice(["due", "due", "overdue", "paid"])
    days = rng.randint(3, 20)
    newest_due = today + timedelta(days=-days if newest == "overdue" else days)
    for index, bill_id in enumerate(ids):
        status = newest if index == 0 else "paid"
        due = newest_due - timedelta(days=31 * index)
        app.db.insert(
            "bills",
            id=bill_id,
            customer_id=customer_id,
            month=f"{due:%Y-%m}",
            amount_cents=rng.randint(1500, 12000),
            late_fee_cents=rng.choice([0, 500, 800, 1000]) if status != "due" else 0,
            due=due.isoformat(),
            status=status,
        )
