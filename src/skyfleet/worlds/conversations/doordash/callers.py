"""Who writes in the doordash world, and how an agent identifies them."""

from __future__ import annotations

from random import Random

from skyfleet.worlds.conversations.dialogue import Dialogue, fact
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App

_ORDERS = """
select orders.*, restaurants.name as restaurant, restaurants.zone as zone, customers.phone,
    customers.email, refunds_last_30_days
from orders join restaurants on restaurants.id = restaurant_id
join customers on customers.id = customer_id"""
_ITEMS = """
select order_items.*, menu_items.name, price_cents, is_alcohol
from order_items join menu_items on id = item_id"""
FEW_REFUNDS = "refunds_last_30_days < 3"
MANY_REFUNDS = "refunds_last_30_days >= 3"


def pick_order(app: App, rng: Random, where: str) -> Row | None:
    """Return an order that fits the SQL condition, or None."""
    rows = app.db.rows(f"{_ORDERS} where {where} order by orders.id")
    return rng.choice(rows) if rows else None


def items_of(app: App, order: Row, *, alcohol: bool | None = False) -> list[Row]:
    """Return the items of an order: food, alcohol, or both for None."""
    rows = app.db.rows(f"{_ITEMS} where order_id = ? order by item_id", order["id"])
    return [row for row in rows if alcohol is None or bool(row["is_alcohol"]) == alcohol]


def identify(dialogue: Dialogue, order: Row) -> Dialogue:
    """Ask who it is and which order it is about, and look at the order."""
    customer_id = order["customer_id"]
    return (
        dialogue.ask(
            "May I have your phone number and your email address?",
            fact(f"My phone number is {order['phone']}.", "phone", "telephone"),
            fact(f"My email address is {order['email']}.", "email", "e-mail", "mail"),
        )
        .call("find_customer", phone=order["phone"])
        .call("verify_customer", customer_id=customer_id, email=order["email"])
        .ask(
            "Which order is it?",
            fact(f"It is my order from {order['restaurant']}.", "order", "restaurant"),
        )
        .call("list_orders", customer_id=customer_id)
        .call("get_order", order_id=order["id"])
    )


def count_text(item: Row, quantity: int) -> str:
    return f"{quantity} {item['name']}"
