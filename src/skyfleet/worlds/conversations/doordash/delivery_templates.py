"""Doordash tasks about orders that were delivered, and about tips."""

from __future__ import annotations

from random import Random

from skyfleet.worlds.conversations.dialogue import Dialogue, fact, money
from skyfleet.worlds.conversations.doordash.callers import (
    FEW_REFUNDS,
    MANY_REFUNDS,
    count_text,
    identify,
    items_of,
    pick_order,
)
from skyfleet.worlds.conversations.doordash.tools import doordash
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft

_RECENT = "status = 'delivered' and hours_ago <= 48"
_OLD = "status = 'delivered' and hours_ago > 48"
_COMPLAINTS = ("Something is missing from my food.", "My order was not complete.")


def _ask_missing(dialogue: Dialogue, order: Row, text: str) -> Dialogue:
    return dialogue.ask(
        "What is missing?", fact(f"Missing: {text}.", "missing", "what", "item", "wrong")
    ).call("list_items", order_id=order["id"])


@doordash.template(difficulty=2)
def refund_missing_item(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, f"{_RECENT} and {FEW_REFUNDS}")
    items = items_of(app, order) if order else []
    if order is None or not items:
        return None
    item = rng.choice(items)
    quantity = rng.randint(1, item["quantity"])
    amount = money(quantity * item["price_cents"])
    dialogue = Dialogue(rng.choice(_COMPLAINTS))
    identify(dialogue, order)
    return (
        _ask_missing(dialogue, order, count_text(item, quantity))
        .confirm(f"refund {count_text(item, quantity)}, {amount}")
        .call("refund_item", order_id=order["id"], item_id=item["item_id"], quantity=quantity)
        .report(f"You get {amount} back.", amount)
        .draft()
    )


@doordash.template(difficulty=3)
def refund_two_items(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, f"{_RECENT} and {FEW_REFUNDS}")
    items = items_of(app, order) if order else []
    if order is None or len(items) < 2:
        return None
    first, second = rng.sample(items, 2)
    total = money(first["price_cents"] + second["price_cents"])
    dialogue = Dialogue(rng.choice(_COMPLAINTS))
    identify(dialogue, order)
    _ask_missing(dialogue, order, f"{count_text(first, 1)} and {count_text(second, 1)}")
    dialogue.confirm(f"refund {first['name']} and {second['name']}, {total} together")
    for item in (first, second):
        dialogue.call("refund_item", order_id=order["id"], item_id=item["item_id"], quantity=1)
    return dialogue.report(f"You get {total} back in all.", total).draft()


@doordash.template(difficulty=3)
def refund_with_second_thoughts(app: App, rng: Random) -> TaskDraft | None:
    """The user finds one of the items again."""
    order = pick_order(app, rng, f"{_RECENT} and {FEW_REFUNDS}")
    items = items_of(app, order) if order else []
    if order is None or len(items) < 2:
        return None
    kept, missing = rng.sample(items, 2)
    amount = money(missing["price_cents"])
    dialogue = Dialogue(rng.choice(_COMPLAINTS))
    identify(dialogue, order)
    _ask_missing(dialogue, order, f"{count_text(kept, 1)} and {count_text(missing, 1)}")
    return (
        dialogue.confirm(
            f"refund {kept['name']} and {missing['name']}",
            change_of_mind=f"One moment, the {kept['name']} is here after all. Refund only the other.",
        )
        .confirm(f"refund only {missing['name']}, {amount}")
        .call("refund_item", order_id=order["id"], item_id=missing["item_id"], quantity=1)
        .report(f"You get {amount} back.", amount)
        .draft()
    )


@doordash.template(difficulty=2)
def complaint_too_late(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, f"{_OLD} and {FEW_REFUNDS}")
    items = items_of(app, order) if order else []
    if order is None or not items:
        return None
    dialogue = Dialogue(rng.choice(_COMPLAINTS))
    identify(dialogue, order)
    return (
        _ask_missing(dialogue, order, count_text(rng.choice(items), 1))
        .refuse(
            "R5",
            f"The delivery was {order['hours_ago']} hours ago, more than 48.",
            objection="I had no time to write earlier.",
        )
        .draft()
    )


@doordash.template(difficulty=3)
def too_many_refunds(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, f"{_RECENT} and {MANY_REFUNDS}")
    items = items_of(app, order) if order else []
    if order is None or not items:
        return None
    dialogue = Dialogue(rng.choice(_COMPLAINTS))
    identify(dialogue, order)
    return (
        _ask_missing(dialogue, order, count_text(rng.choice(items), 1))
        .refuse(
            "R6",
            f"You had {order['refunds_last_30_days']} refunds in the last 30 days.",
            objection="It is not my fault that you forget things!",
        )
        .draft()
    )


@doordash.template(difficulty=2)
def no_refund_for_alcohol(app: App, rng: Random) -> TaskDraft | None:
    has_alcohol = (
        "exists (select 1 from order_items join menu_items on menu_items.id = item_id"
        " where order_id = orders.id and is_alcohol)"
    )
    order = pick_order(app, rng, f"{_RECENT} and {FEW_REFUNDS} and {has_alcohol}")
    if order is None:
        return None
    item = items_of(app, order, alcohol=True)[0]
    dialogue = Dialogue(rng.choice(_COMPLAINTS))
    identify(dialogue, order)
    return (
        _ask_missing(dialogue, order, count_text(item, 1))
        .refuse("R7", f"{item['name']} is alcohol.", objection="But I have paid for it.")
        .draft()
    )


@doordash.template(difficulty=2)
def credit_for_late_order(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "late_minutes >= 30")
    if order is None:
        return None
    dollars = 10 if order["late_minutes"] >= 60 else 5
    dialogue = Dialogue(
        rng.choice(["My food came far too late.", "I waited too long for my food."])
    )
    identify(dialogue, order)
    amount = money(100 * dollars)
    return (
        dialogue.confirm(f"give you a credit of {amount} for {order['late_minutes']} minutes")
        .call("give_credit", order_id=order["id"], dollars=dollars)
        .report(f"You have a credit of {amount}.", amount)
        .draft()
    )


@doordash.template(difficulty=2, held_out=True)
def not_late_enough(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "late_minutes between 1 and 29")
    if order is None:
        return None
    dialogue = Dialogue("My food was late. I want something for it.")
    identify(dialogue, order)
    return dialogue.refuse(
        "R8", f"It was {order['late_minutes']} minutes late.", objection="It was cold, too."
    ).draft()


@doordash.template(difficulty=3, held_out=True)
def late_and_incomplete(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, f"{_RECENT} and {FEW_REFUNDS} and late_minutes >= 30")
    items = items_of(app, order) if order else []
    if order is None or not items:
        return None
    item, dollars = rng.choice(items), 10 if order["late_minutes"] >= 60 else 5
    refund, credit = money(item["price_cents"]), money(100 * dollars)
    dialogue = Dialogue("My food came late, and not all of it.")
    identify(dialogue, order)
    return (
        _ask_missing(dialogue, order, count_text(item, 1))
        .confirm(f"refund {refund} and give you a credit of {credit}")
        .call("refund_item", order_id=order["id"], item_id=item["item_id"], quantity=1)
        .call("give_credit", order_id=order["id"], dollars=dollars)
        .report(f"You get {refund} back and a credit of {credit}.", refund, credit)
        .draft()
    )


def _ask_tip(dialogue: Dialogue, dollars: int) -> Dialogue:
    return dialogue.ask(
        "What tip do you want to give?",
        fact(f"I want a tip of {dollars} dollars.", "tip", "how much"),
    )


@doordash.template(difficulty=1)
def raise_tip(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "1")
    if order is None:
        return None
    dollars = order["tip_dollars"] + rng.randint(1, 9)
    dialogue = Dialogue(rng.choice(["The driver was great.", "I want to change my tip."]))
    identify(dialogue, order)
    return (
        _ask_tip(dialogue, dollars)
        .confirm(f"raise the tip to {money(100 * dollars)}")
        .call("change_tip", order_id=order["id"], dollars=dollars)
        .report(f"The tip is {money(100 * dollars)} now.")
        .draft()
    )


@doordash.template(difficulty=3)
def tip_stays(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "status = 'delivered' and tip_dollars > 1")
    if order is None:
        return None
    dialogue = Dialogue(rng.choice(["The driver was rude.", "I want to change my tip."]))
    identify(dialogue, order)
    return (
        _ask_tip(dialogue, rng.randrange(order["tip_dollars"]))
        .refuse("R10", "The order is delivered.", objection="The driver does not deserve it.")
        .draft()
    )
