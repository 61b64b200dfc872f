"""Telecom tasks about bills, payments and credits."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from skyfleet.worlds.conversations.dialogue import Dialogue, fact, money
from skyfleet.worlds.conversations.telecom.callers import (
    NO_CARD_NUMBERS,
    ask_card,
    cards_of,
    identify,
    pick_customer,
    unpaid_bill,
)
from skyfleet.worlds.conversations.telecom.tools import telecom
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft

_HAS_LATE_FEE = (
    "exists (select 1 from bills where customer_id = customers.id and late_fee_cents > 0)"
)
_MAY_WAIVE = "customer_years >= 1 and coalesce(months_since_waiver, 99) >= 12"


@telecom.template(difficulty=1)
def state_bill(app: App, rng: Random) -> TaskDraft | None:
    customer = pick_customer(app, rng)
    bill = unpaid_bill(app, customer) if customer else None
    if customer is None or bill is None:
        return None
    dialogue = Dialogue(
        rng.choice(["How much do I owe you, and until when?", "What do I have to pay, and when?"])
    )
    identify(dialogue, customer).call("list_bills", customer_id=customer["id"])
    amount = money(bill["amount_cents"])
    return dialogue.report(
        f"The bill {bill['id']} of {amount} has its due date on {bill['due']}.", amount, bill["due"]
    ).draft()


@telecom.template(difficulty=1)
def pay_open_bill(app: App, rng: Random) -> TaskDraft | None:
    customer = pick_customer(app, rng)
    bill = unpaid_bill(app, customer) if customer else None
    cards = cards_of(app, customer, expired=False) if customer else []
    if customer is None or bill is None or not cards:
        return None
    card = rng.choice(cards)
    dialogue = Dialogue(
        rng.choice(["I want to pay my bill.", "I would like to settle my open bill."]),
        declines=(NO_CARD_NUMBERS,),
    )
    identify(dialogue, customer).call("list_bills", customer_id=customer["id"])
    ask_card(dialogue, customer, card)
    amount = money(bill["amount_cents"])
    return (
        dialogue.confirm(f"pay {amount} with your {card['kind']}")
        .call("pay_bill", bill_id=bill["id"], card_id=card["id"])
        .report(f"I have paid {amount}.", amount)
        .draft()
    )


@telecom.template(difficulty=2)
def pay_with_other_card(app: App, rng: Random) -> TaskDraft | None:
    """The chosen card has expired, so the user names the other one."""
    customer = pick_customer(app, rng)
    bill = unpaid_bill(app, customer) if customer else None
    if customer is None or bill is None:
        return None
    expired, good = (cards_of(app, customer, expired=flag) for flag in (True, False))
    if not expired or not good:
        return None
    dialogue = Dialogue("I want to pay what I owe.", declines=(NO_CARD_NUMBERS,))
    identify(dialogue, customer).call("list_bills", customer_id=customer["id"])
    ask_card(dialogue, customer, expired[0])
    amount = money(bill["amount_cents"])
    return (
        dialogue.ask(
            f"Your {expired[0]['kind']} has expired, so I cannot use it. Do you have another one?",
            fact(
                f"If that card does not work, take my {good[0]['kind']}.",
                "another",
                "other",
                "else",
            ),
        )
        .confirm(f"pay {amount} with your {good[0]['kind']}")
        .call("pay_bill", bill_id=bill["id"], card_id=good[0]["id"])
        .report(f"I have paid {amount}.", amount)
        .draft()
    )


@telecom.template(difficulty=2)
def waive_late_fee(app: App, rng: Random) -> TaskDraft | None:
    customer = pick_customer(app, rng, f"{_HAS_LATE_FEE} and {_MAY_WAIVE}")
    if customer is None:
        return None
    sql = "select * from bills where customer_id = ? and late_fee_cents > 0 order by due desc"
    bills = app.db.rows(sql, customer["id"])
    bill = rng.choice(bills)
    dollars = bill["late_fee_cents"] // 100
    dialogue = Dialogue("You charged me a late fee. I want it back.")
    identify(dialogue, customer)
    return (
        dialogue.ask(
            "Which month is the bill with the fee from?",
            fact(f"The fee is on the bill of {bill['month']}.", "month", "bill"),
        )
        .call("list_bills", customer_id=customer["id"])
        .confirm(f"give you a credit of {money(100 * dollars)} for the late fee")
        .call("give_credit", customer_id=customer["id"], kind="late_fee", dollars=dollars)
        .report(f"You have a credit of {money(100 * dollars)}.", money(100 * dollars))
        .draft()
    )


@telecom.template(difficulty=2, held_out=True)
def late_fee_stays(app: App, rng: Random) -> TaskDraft | None:
    customer = pick_customer(app, rng, f"{_HAS_LATE_FEE} and not ({_MAY_WAIVE})")
    if customer is None:
        return None
    dialogue = Dialogue(
        rng.choice(["Please take the late fee off my bill.", "I do not want to pay a late fee."])
    )
    identify(dialogue, customer).call("list_bills", customer_id=customer["id"])
    reason = (
        "You have been with us for less than a year."
        if customer["customer_years"] < 1
        else "Your last late fee was waived less than 12 months ago."
    )
    return dialogue.refuse("R7", reason, objection="Can you not make an exception for me?").draft()


@telecom.template(difficulty=2)
def credit_for_outage(app: App, rng: Random) -> TaskDraft | None:
    ended = "(select area from outages where status = 'ended' and hours >= 24)"
    customer = pick_customer(app, rng, f"area in {ended}")
    if customer is None:
        return None
    hours = app.db.column("select hours from outages where area = ?", customer["area"])[0]
    dollars = min(20, 5 * (hours // 24))
    dialogue = Dialogue(
        rng.choice(
            [
                "The network was down where I live. I want money back for that.",
                "I had no network for a while and want to be compensated.",
            ]
        )
    )
    identify(dialogue, customer).call("list_outages", area=customer["area"])
    return (
        dialogue.confirm(f"give you a credit of {money(100 * dollars)} for {hours} hours")
        .call("give_credit", customer_id=customer["id"], kind="outage", dollars=dollars)
        .report(f"You have a credit of {money(100 * dollars)}.", money(100 * dollars))
        .draft()
    )


@telecom.template(difficulty=2)
def no_credit_for_short_outage(app: App, rng: Random) -> TaskDraft | None:
    ended = "(select area from outages where status = 'ended' and hours < 24)"
    customer = pick_customer(app, rng, f"area in {ended}")
    if customer is None:
        return None
    dialogue = Dialogue("My network failed the other day. I want a credit for it.")
    identify(dialogue, customer).call("list_outages", area=customer["area"])
    return dialogue.refuse(
        "R6", "The outage was shorter than 24 hours.", objection="But it cost me a whole afternoon."
    ).draft()


@telecom.template(difficulty=1)
def wrong_pin(app: App, rng: Random) -> TaskDraft | None:
    customer = pick_customer(app, rng)
    if customer is None:
        return None
    first, second = (str((int(customer["pin"]) + step) % 9000 + 1000) for step in (137, 2741))
    if customer["pin"] in (first, second):
        return None
    dialogue = Dialogue(rng.choice(["I need my latest bill.", "I want to change my plan."]))
    draft = (
        dialogue.ask(
            "May I have your full name and your PIN?",
            fact(f"My name is {customer['name']}.", "name"),
            fact(f"I think my PIN is {first}.", "pin", "passcode", "code"),
        )
        .call("find_customer", name=customer["name"])
        .call("verify_customer", customer_id=customer["id"], pin=first)
        .ask(
            "That is wrong. Can you try again?",
            fact(f"If that is wrong, it may be {second}.", "again", "another", "wrong", "try"),
        )
        .call("verify_customer", customer_id=customer["id"], pin=second)
        .refuse("R1", "Without the right PIN I cannot help you.", objection="It is really me!")
        .draft()
    )
    return replace(draft, expected_errors=2)
