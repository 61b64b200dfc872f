"""Who calls in the telecom world, and how an agent identifies them."""

from __future__ import annotations

from random import Random

from skyfleet.worlds.conversations.dialogue import Dialogue, fact
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App

NOT_OVERDUE = (
    "not exists (select 1 from bills where customer_id = customers.id and status = 'overdue')"
)
OVERDUE = "exists (select 1 from bills where customer_id = customers.id and status = 'overdue')"
NO_CARD_NUMBERS = fact(
    "I do not give card numbers in a chat.",
    "card number",
    "number of the card",
    "number of your card",
)


def pick_customer(app: App, rng: Random, where: str = "1") -> Row | None:
    """Return a customer who fits the SQL condition, or None."""
    rows = app.db.rows(f"select * from customers where {where} order by id")
    return rng.choice(rows) if rows else None


def pick_line(app: App, rng: Random, where: str = "1") -> tuple[Row, Row] | None:
    """Return a customer and an active line; both fit the condition, in which `lines` and `customers`
    are joined."""
    rows = app.db.rows(
        "select number from lines join customers on customers.id = customer_id"
        f" join plans on plans.id = plan_id where status = 'active' and {where} order by number"
    )
    if not rows:
        return None
    line = app.db.row(
        "select lines.*, plans.name as plan, monthly_cents, data_gb, model, installments_left"
        " from lines join plans on plans.id = plan_id join devices on line = number where number = ?",
        rng.choice(rows)["number"],
    )
    assert line is not None
    customer = app.db.row("select * from customers where id = ?", line["customer_id"])
    assert customer is not None
    return customer, line


def identify(dialogue: Dialogue, customer: Row) -> Dialogue:
    return (
        dialogue.ask(
            "May I have your full name and your PIN?",
            fact(f"My name is {customer['name']}.", "name"),
            fact(f"My PIN is {customer['pin']}.", "pin", "passcode", "code"),
        )
        .call("find_customer", name=customer["name"])
        .call("verify_customer", customer_id=customer["id"], pin=customer["pin"])
    )


def ask_line(dialogue: Dialogue, customer: Row, line: Row) -> Dialogue:
    """Ask for the line and look at it."""
    return dialogue.ask(
        "Which line is it about?",
        fact(f"It is about the line {line['number']}.", "line", "phone number", "which number"),
    ).call("list_lines", customer_id=customer["id"])


def unpaid_bill(app: App, customer: Row) -> Row | None:
    sql = "select * from bills where customer_id = ? and status != 'paid'"
    return app.db.row(sql, customer["id"])


def cards_of(app: App, customer: Row, *, expired: bool) -> list[Row]:
    sql = "select * from cards where customer_id = ? and is_expired = ? order by id"
    return app.db.rows(sql, customer["id"], int(expired))


def ask_card(dialogue: Dialogue, customer: Row, card: Row) -> Dialogue:
    return dialogue.ask(
        "With which card do you want to pay?",
        fact(f"I pay with my {card['kind']}.", "card", "pay with", "payment method"),
    ).call("list_cards", customer_id=customer["id"])
