"""Telecom tasks about lines and devices."""

from __future__ import annotations

from random import Random

from skyfleet.worlds.conversations.dialogue import Dialogue, money
from skyfleet.worlds.conversations.telecom.callers import (
    ask_line,
    identify,
    pick_line,
)
from skyfleet.worlds.conversations.telecom.tools import telecom
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft

_PROBLEMS = {
    "no_signal": "I have no signal on my phone.",
    "slow_data": "My mobile data is very slow.",
    "dropped_calls": "My calls are dropped all the time.",
}


@telecom.template(difficulty=1)
def suspend_lost_phone(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng)
    if picked is None:
        return None
    customer, line = picked
    dialogue = Dialogue(rng.choice(["I lost my phone!", "Somebody stole my phone."]))
    identify(dialogue, customer)
    return (
        ask_line(dialogue, customer, line)
        .confirm(f"suspend the line {line['number']}")
        .call("set_line_status", line=line["number"], status="suspended")
        .report("The line is suspended, so nobody can use it.")
        .draft()
    )


@telecom.template(difficulty=1)
def report_fault(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng, "area not in (select area from outages where status = 'open')")
    if picked is None:
        return None
    customer, line = picked
    problem, complaint = rng.choice(list(_PROBLEMS.items()))
    dialogue = Dialogue(complaint)
    identify(dialogue, customer)
    return (
        ask_line(dialogue, customer, line)
        .call("list_outages", area=customer["area"])
        .confirm(f"open a ticket for the line {line['number']}")
        .call("open_ticket", line=line["number"], problem=problem)
        .report("There is a ticket now, and our technicians look at it.")
        .draft()
    )


@telecom.template(difficulty=2, held_out=True)
def fault_in_outage(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng, "area in (select area from outages where status = 'open')")
    if picked is None:
        return None
    customer, line = picked
    end = app.db.column("select expected_end from outages where area = ?", customer["area"])[0]
    dialogue = Dialogue(rng.choice(list(_PROBLEMS.values())))
    identify(dialogue, customer)
    return (
        ask_line(dialogue, customer, line)
        .call("list_outages", area=customer["area"])
        .report(f"There is an outage in your area. We expect it to end on {end}.", end)
        .draft()
    )


@telecom.template(difficulty=2)
def unlock_paid_device(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng)
    if picked is None or picked[1]["installments_left"]:
        return None
    customer, line = picked
    dialogue = Dialogue("I want to use my phone with another network. Unlock it.")
    identify(dialogue, customer)
    return (
        ask_line(dialogue, customer, line)
        .confirm(f"unlock the {line['model']} of {line['number']}")
        .call("unlock_device", line=line["number"])
        .report(f"Your {line['model']} is unlocked.")
        .draft()
    )


@telecom.template(difficulty=2)
def device_stays_locked(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng)
    if picked is None or not picked[1]["installments_left"]:
        return None
    customer, line = picked
    dialogue = Dialogue("I travel soon. I need my phone unlocked for other networks.")
    identify(dialogue, customer)
    left = line["installments_left"]
    return (
        ask_line(dialogue, customer, line)
        .refuse("R8", f"The device has {left} installments left.", objection="I will pay later!")
        .draft()
    )


@telecom.template(difficulty=3)
def cancel_with_fee(app: App, rng: Random) -> TaskDraft | None:
    others = (
        "(select count(*) from lines as l where l.customer_id = customers.id and l.status ="
        " 'active') > 1"
    )
    picked = pick_line(app, rng, f"months_left > 0 and {others}")
    if picked is None:
        return None
    customer, line = picked
    fee = money(1000 * line["months_left"])
    dialogue = Dialogue(rng.choice(["I want to cancel a line.", "I do not need a line any more."]))
    identify(dialogue, customer)
    return (
        ask_line(dialogue, customer, line)
        .confirm(f"cancel {line['number']} with a fee of {fee}")
        .call("set_line_status", line=line["number"], status="cancelled")
        .report(f"The line is cancelled, and the fee is {fee}.", fee)
        .draft()
    )


@telecom.template(difficulty=3)
def last_line_stays(app: App, rng: Random) -> TaskDraft | None:
    only = (
        "(select count(*) from lines as l where l.customer_id = customers.id and l.status ="
        " 'active') = 1"
    )
    picked = pick_line(app, rng, only)
    if picked is None:
        return None
    customer, line = picked
    dialogue = Dialogue("I want to cancel my line.")
    identify(dialogue, customer)
    return (
        ask_line(dialogue, customer, line)
        .refuse("R10", "It is your only active line.", objection="I want to leave you anyway.")
        .draft()
    )


@telecom.template(difficulty=3)
def call_for_somebody_else(app: App, rng: Random) -> TaskDraft | None:
    picked = pick_line(app, rng)
    if picked is None:
        return None
    customer, _ = picked
    who = rng.choice(["my mother", "my father", "my boss", "my neighbor"])
    dialogue = Dialogue(
        f"I call for {who}, {customer['name']}. " + rng.choice(list(_PROBLEMS.values()))
    )
    return dialogue.refuse(
        "R2",
        "I can only help the account holder.",
        objection=f"But I know the PIN, it is {customer['pin']}.",
    ).draft()
