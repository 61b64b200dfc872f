"""Doordash tasks about orders that are on their way."""

from __future__ import annotations

from random import Random

from skyfleet.worlds.conversations.dialogue import Dialogue, fact, money
from skyfleet.worlds.conversations.doordash.callers import (
    count_text,
    identify,
    items_of,
    pick_order,
)
from skyfleet.worlds.conversations.doordash.tools import compute_subtotal, doordash
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft


@doordash.template(difficulty=1)
def state_arrival(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "eta is not null")
    if order is None:
        return None
    dialogue = Dialogue(rng.choice(["When does my food arrive?", "Where is my food? I am hungry."]))
    identify(dialogue, order)
    eta = order["eta"]
    return dialogue.report(f"Your food arrives at {eta}.", eta).draft()


@doordash.template(difficulty=1)
def cancel_placed(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "status = 'placed'")
    return None if order is None else _cancel(app, rng, order, 100)


@doordash.template(difficulty=3)
def cancel_in_preparation(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "status = 'preparing'")
    return None if order is None else _cancel(app, rng, order, 50)


def _cancel(app: App, rng: Random, order: Row, percent: int) -> TaskDraft:
    refund = money(compute_subtotal(app, order["id"]) * percent // 100)
    dialogue = Dialogue(rng.choice(["I want to cancel an order.", "Please cancel my food."]))
    identify(dialogue, order)
    return (
        dialogue.confirm(f"cancel the order and refund {refund}")
        .call("cancel_order", order_id=order["id"], refund_percent=percent)
        .report(f"The order is cancelled, and you get {refund} back.", refund)
        .draft()
    )


@doordash.template(difficulty=2)
def too_late_to_cancel(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "status = 'picked_up'")
    if order is None:
        return None
    dialogue = Dialogue(rng.choice(["Cancel my order.", "I do not want my food any more."]))
    identify(dialogue, order)
    return dialogue.refuse(
        "R4", "The order is picked up already.", objection="Then let the driver turn around."
    ).draft()


@doordash.template(difficulty=1)
def remove_item(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "status = 'placed'")
    if order is None:
        return None
    item = rng.choice(items_of(app, order, alcohol=None))
    dialogue = Dialogue(rng.choice(["I ordered too much.", "Take something off my order."]))
    identify(dialogue, order)
    return (
        dialogue.ask(
            "Which item do you not want?",
            fact(f"I do not want the {item['name']}.", "item", "dish", "what", "which"),
        )
        .call("list_items", order_id=order["id"])
        .confirm(f"remove {item['name']} from your order")
        .call("change_item", order_id=order["id"], item_id=item["item_id"], quantity=0)
        .report(f"I have removed {item['name']}.")
        .draft()
    )


def _new_items(app: App, order: Row, *, alcohol: bool) -> list[Row]:
    """What the restaurant sells and the order does not contain."""
    return app.db.rows(
        "select id as item_id, name, price_cents from menu_items where restaurant_id = ?"
        " and is_alcohol = ? and id not in (select item_id from order_items where order_id = ?)"
        " order by id",
        order["restaurant_id"],
        int(alcohol),
        order["id"],
    )


@doordash.template(difficulty=3)
def add_with_second_thoughts(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "status = 'placed'")
    items = _new_items(app, order, alcohol=False) if order else []
    if order is None or len(items) < 2:
        return None
    first, last = rng.sample(items, 2)
    n_first, n_last = rng.sample([1, 2, 3], 2)
    dialogue = Dialogue(
        rng.choice(["I want to add something.", "We are more people than I thought."])
    )
    identify(dialogue, order)
    return (
        dialogue.ask(
            "What do you want to add, and how many?",
            fact(f"Add {count_text(first, n_first)}.", "add", "what", "item", "many"),
        )
        .call("list_menu", restaurant_id=order["restaurant_id"])
        .confirm(
            f"add {count_text(first, n_first)}",
            change_of_mind=f"Hm, no. I take {count_text(last, n_last)} instead of that.",
        )
        .confirm(f"add {count_text(last, n_last)} and no {first['name']}")
        .call("change_item", order_id=order["id"], item_id=last["item_id"], quantity=n_last)
        .report(f"I have added {count_text(last, n_last)}.")
        .draft()
    )


@doordash.template(difficulty=3)
def swap_items(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "status = 'placed'")
    items = _new_items(app, order, alcohol=False) if order else []
    if order is None or not items:
        return None
    old, new = rng.choice(items_of(app, order, alcohol=None)), rng.choice(items)
    dialogue = Dialogue(rng.choice(["I ordered the wrong thing.", "I want something else to eat."]))
    identify(dialogue, order)
    return (
        dialogue.ask(
            "Which item is wrong?",
            fact(f"I do not want the {old['name']}.", "wrong", "remove", "not want"),
        )
        .ask(
            "What do you want instead?",
            fact(f"Instead I want 1 {new['name']}.", "instead", "replace", "else"),
        )
        .call("list_items", order_id=order["id"])
        .call("list_menu", restaurant_id=order["restaurant_id"])
        .confirm(f"remove {old['name']} and add 1 {new['name']}")
        .call("change_item", order_id=order["id"], item_id=old["item_id"], quantity=0)
        .call("change_item", order_id=order["id"], item_id=new["item_id"], quantity=1)
        .report(f"You get {new['name']} and no {old['name']}.")
        .draft()
    )


@doordash.template(difficulty=2)
def items_are_fixed(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "status in ('preparing', 'picked_up')")
    items = _new_items(app, order, alcohol=False) if order else []
    if order is None or not items:
        return None
    item = rng.choice(items)
    dialogue = Dialogue(f"Add one {item['name']} to my food.")
    identify(dialogue, order)
    return dialogue.refuse(
        "R2", "The restaurant has started with your order.", objection="It is only one more!"
    ).draft()


@doordash.template(difficulty=2, held_out=True)
def no_alcohol_added(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "status = 'placed'")
    items = _new_items(app, order, alcohol=True) if order else []
    if order is None or not items:
        return None
    dialogue = Dialogue(rng.choice(["I want to add a drink.", "I forgot to order a drink."]))
    identify(dialogue, order)
    return (
        dialogue.ask(
            "What do you want to drink?",
            fact(f"I want one {items[0]['name']}.", "drink", "what", "item"),
        )
        .call("list_menu", restaurant_id=order["restaurant_id"])
        .refuse("R7", "I cannot add alcohol.", objection="I am old enough.")
        .draft()
    )


def _addresses(app: App, order: Row, *, same_zone: bool) -> list[Row]:
    sql = "select * from addresses where customer_id = ? and id != ? order by id"
    rows = app.db.rows(sql, order["customer_id"], order["address_id"])
    return [row for row in rows if (row["zone"] == order["zone"]) == same_zone]


def _ask_address(dialogue: Dialogue, order: Row, address: Row) -> Dialogue:
    return dialogue.ask(
        "To which address do you want it?",
        fact(f"Bring it to my {address['label']}.", "address", "where", "place"),
    ).call("list_addresses", customer_id=order["customer_id"])


@doordash.template(difficulty=1)
def change_address_of_order(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "status = 'placed'")
    addresses = _addresses(app, order, same_zone=True) if order else []
    if order is None or not addresses:
        return None
    address = rng.choice(addresses)
    dialogue = Dialogue(rng.choice(["I am somewhere else now.", "Deliver my food somewhere else."]))
    identify(dialogue, order)
    return (
        _ask_address(dialogue, order, address)
        .confirm(f"deliver the order to your {address['label']}, {address['street']}")
        .call("change_address", order_id=order["id"], address_id=address["id"])
        .report(f"We deliver to your {address['label']}.")
        .draft()
    )


@doordash.template(difficulty=2)
def address_out_of_zone(app: App, rng: Random) -> TaskDraft | None:
    order = pick_order(app, rng, "status = 'placed'")
    addresses = _addresses(app, order, same_zone=False) if order else []
    if order is None or not addresses:
        return None
    dialogue = Dialogue(rng.choice(["Bring my food to another place.", "I entered a wrong place."]))
    identify(dialogue, order)
    address = rng.choice(addresses)
    return (
        _ask_address(dialogue, order, address)
        .refuse(
            "R3",
            f"The restaurant is in zone {order['zone']}, and the address in {address['zone']}.",
            objection="It is not far at all.",
        )
        .draft()
    )


@doordash.template(difficulty=2)
def use_promo(app: App, rng: Random) -> TaskDraft | None:
    return _promo(app, rng, is_enough=True)


@doordash.template(difficulty=3)
def promo_below_minimum(app: App, rng: Random) -> TaskDraft | None:
    return _promo(app, rng, is_enough=False)


def _promo(app: App, rng: Random, *, is_enough: bool) -> TaskDraft | None:
    order = pick_order(app, rng, "status = 'placed' and promo is null")
    if order is None:
        return None
    subtotal = compute_subtotal(app, order["id"])
    promos = app.db.rows(
        "select * from promos where code in (select code from customer_promos where customer_id = ?)"
        " order by code",
        order["customer_id"],
    )
    fitting = [one for one in promos if (one["minimum_cents"] <= subtotal) == is_enough]
    if not fitting:
        return None
    promo = rng.choice(fitting)
    dialogue = Dialogue(rng.choice(["I forgot my promo code.", "I have a code for a discount."]))
    identify(dialogue, order)
    dialogue.ask("What is the code?", fact(f"The code is {promo['code']}.", "code", "promo")).call(
        "list_promos", customer_id=order["customer_id"]
    )
    if not is_enough:
        minimum = money(promo["minimum_cents"])
        return dialogue.refuse(
            "R9", f"The code needs a subtotal of {minimum}.", objection="It is nearly enough!"
        ).draft()
    return (
        dialogue.confirm(f"apply {promo['code']} for {promo['percent']} percent off")
        .call("apply_promo", order_id=order["id"], code=promo["code"])
        .report(f"You get {promo['percent']} percent off.", f"{promo['percent']} percent")
        .draft()
    )
