"""Telecom tasks about plans and add-ons."""

from __future__ import annotations

from random import Random

from skyfleet.worlds.conversations.dialogue import Dialogue, fact, money
from skyfleet.worlds.conversations.telecom.callers import (
    NO_CARD_NUMBERS,
    NOT_OVERDUE,
    OVERDUE,
    ask_card,
    ask_line,
    cards_of,
    identify,
    pick_line,
    unpaid_bill,
)
from skyfleet.worlds.conversations.telecom.tools import telecom
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft


def _want_plan(plan: Row) -> str:
    return f"I want the plan {plan['name']}."


def _plans(app: App, condition: str, *values: object) -> list[Row]:
    return app.db.rows(f"select * from plans where {condition} order by id", *values)


@telecom.template(difficulty=1)
def add_addon(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng, NOT_OVERDUE)
    if picked is None:
        return None
    customer, line = picked
    addons = app.db.rows(
        "select * from addons where id not in (select addon_id from line_addons where line = ?)"
        " order by id",
        line["number"],
    )
    if not addons:
        return None
    addon = rng.choice(addons)
    dialogue = Dialogue(
        rng.choice(["I need an add-on for my line.", "I would like to book an add-on."])
    )
    identify(dialogue, customer)
    ask_line(dialogue, customer, line)
    price = money(addon["monthly_cents"])
    return (
        dialogue.ask(
            "What kind of add-on is it?",
            fact(f"I want the add-on {addon['name']}.", "add-on", "addon", "what kind"),
        )
        .call("list_bills", customer_id=customer["id"])
        .call("list_addons", line=line["number"])
        .confirm(f"add {addon['name']} for {price} a month to {line['number']}")
        .call("change_addon", line=line["number"], addon_id=addon["id"], action="add")
        .report(f"{addon['name']} is active now and costs {price} a month.", price)
        .draft()
    )


@telecom.template(difficulty=2)
def upgrade_plan(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng, f"{NOT_OVERDUE} and monthly_cents < 6000")
    if picked is None:
        return None
    customer, line = picked
    plan = rng.choice(_plans(app, "monthly_cents > ?", line["monthly_cents"]))
    dialogue = Dialogue(rng.choice(["I want a bigger plan.", "My plan is too small for me."]))
    identify(dialogue, customer)
    return _change_plan(ask_line(dialogue, customer, line), customer, line, plan).draft()


def _change_plan(dialogue: Dialogue, customer: Row, line: Row, plan: Row) -> Dialogue:
    price = money(plan["monthly_cents"])
    return (
        dialogue.ask(
            "Which plan do you want to have?", fact(_want_plan(plan), "plan", "tariff", "package")
        )
        .call("list_plans")
        .call("list_bills", customer_id=customer["id"])
        .confirm(f"change {line['number']} to {plan['name']} for {price} a month")
        .call("change_plan", line=line["number"], plan_id=plan["id"])
        .report(f"You have {plan['name']} for {price} a month now.", price)
    )


@telecom.template(difficulty=2)
def downgrade_in_contract(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng, f"{NOT_OVERDUE} and months_left > 0 and monthly_cents > 1500")
    if picked is None:
        return None
    customer, line = picked
    plan = rng.choice(_plans(app, "monthly_cents < ?", line["monthly_cents"]))
    dialogue = Dialogue(rng.choice(["I want to pay less per month.", "I need a cheaper plan."]))
    identify(dialogue, customer)
    return (
        ask_line(dialogue, customer, line)
        .ask("Which plan do you want?", fact(_want_plan(plan), "plan", "tariff", "package"))
        .call("list_plans")
        .refuse(
            "R3",
            f"The contract of this line has {line['months_left']} months left.",
            objection="I am a good customer. Please do it.",
        )
        .draft()
    )


@telecom.template(difficulty=3)
def upgrade_with_second_thoughts(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng, f"{NOT_OVERDUE} and monthly_cents < 4000")
    if picked is None:
        return None
    customer, line = picked
    first, last = rng.sample(_plans(app, "monthly_cents > ?", line["monthly_cents"]), 2)
    dialogue = Dialogue("I want to change my plan.")
    identify(dialogue, customer)
    price = money(last["monthly_cents"])
    return (
        ask_line(dialogue, customer, line)
        .ask("Which plan do you want?", fact(_want_plan(first), "plan", "tariff", "package"))
        .call("list_plans")
        .call("list_bills", customer_id=customer["id"])
        .confirm(
            f"change {line['number']} to {first['name']}",
            change_of_mind=f"Wait, I have changed my mind. Make it {last['name']} instead.",
        )
        .confirm(f"change {line['number']} to {last['name']} for {price} a month")
        .call("change_plan", line=line["number"], plan_id=last["id"])
        .report(f"You have {last['name']} for {price} a month now.", price)
        .draft()
    )


@telecom.template(difficulty=3)
def pay_then_upgrade(app: App, rng: Random) -> TaskDraft | None:
    """The overdue bill blocks the change until it is paid."""
    picked = pick_line(app, rng, f"{OVERDUE} and monthly_cents < 6000")
    if picked is None:
        return None
    customer, line = picked
    bill, cards = unpaid_bill(app, customer), cards_of(app, customer, expired=False)
    if bill is None or not cards:
        return None
    plan = rng.choice(_plans(app, "monthly_cents > ?", line["monthly_cents"]))
    card, amount = rng.choice(cards), money(bill["amount_cents"])
    dialogue = Dialogue("I need a bigger plan.", declines=(NO_CARD_NUMBERS,))
    identify(dialogue, customer)
    ask_line(dialogue, customer, line).ask(
        "Which plan do you want?", fact(_want_plan(plan), "plan", "tariff", "package")
    ).call("list_plans").call("list_bills", customer_id=customer["id"])
    ask_card(
        dialogue.ask(
            f"A bill of {amount} is overdue. Before that is paid, I can change nothing. "
            "Do you want to pay it?"
        ),
        customer,
        card,
    )
    return (
        dialogue.confirm(f"pay {amount} with your {card['kind']} and change to {plan['name']}")
        .call("pay_bill", bill_id=bill["id"], card_id=card["id"])
        .call("change_plan", line=line["number"], plan_id=plan["id"])
        .report(f"I have paid {amount}, and you have {plan['name']} now.", amount)
        .draft()
    )


@telecom.template(difficulty=3)
def no_addon_while_overdue(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng, OVERDUE)
    if picked is None:
        return None
    customer, line = picked
    bill = unpaid_bill(app, customer)
    if bill is None:
        return None
    addon = rng.choice(app.db.column("select name from addons order by id"))
    dialogue = Dialogue("Give me an add-on for my trip.", declines=(NO_CARD_NUMBERS,))
    identify(dialogue, customer)
    return (
        ask_line(dialogue, customer, line)
        .ask(
            "What kind of add-on is it?",
            fact(f"I want the add-on {addon}.", "add-on", "addon", "what kind"),
        )
        .call("list_bills", customer_id=customer["id"])
        .ask(
            f"A bill of {money(bill['amount_cents'])} is overdue. Is it possible to pay it now?",
            fact("I cannot pay that bill now.", "overdue", "pay", "bill"),
        )
        .refuse("R4", "With an overdue bill there are no add-ons.")
        .draft()
    )


@telecom.template(difficulty=3, held_out=True)
def cheapest_plan_for_use(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng, f"{NOT_OVERDUE} and months_left = 0 and used_gb > 5")
    if picked is None:
        return None
    customer, line = picked
    fitting = app.db.rows(
        "select * from plans where data_gb >= ? order by monthly_cents", line["used_gb"]
    )
    plan = fitting[0]
    if plan["id"] == line["plan_id"]:
        return None
    dialogue = Dialogue("Move me to the cheapest plan that covers the data I used last month.")
    identify(dialogue, customer)
    price = money(plan["monthly_cents"])
    return (
        ask_line(dialogue, customer, line)
        .call("list_plans")
        .call("list_bills", customer_id=customer["id"])
        .confirm(f"change {line['number']} to {plan['name']} for {price} a month")
        .call("change_plan", line=line["number"], plan_id=plan["id"])
        .report(f"You have {plan['name']} for {price} a month now.", price)
        .draft()
    )
