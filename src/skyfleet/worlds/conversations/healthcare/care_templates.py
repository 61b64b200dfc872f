"""Healthcare tasks about prescriptions, results, invoices and questions."""

from __future__ import annotations

from random import Random

from skyfleet.worlds.conversations.dialogue import Dialogue, fact, money
from skyfleet.worlds.conversations.healthcare.callers import (
    ask_medicine,
    get_patient,
    identify,
    pick_appointment,
    pick_patient,
    pick_prescription,
)
from skyfleet.worlds.conversations.healthcare.tables import PHARMACIES
from skyfleet.worlds.conversations.healthcare.tools import healthcare
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft

_EMERGENCIES = (
    "I have a strong pain in my chest and my arm is numb.",
    "My husband can hardly breathe!",
    "My chest hurts badly since an hour, can I have an appointment?",
    "I cannot breathe well and my lips are blue.",
)
_QUESTIONS = (
    "Should I take my medicine before or after a meal?",
    "Is it dangerous that my knee is swollen?",
    "Can I run again two weeks after a flu?",
    "Is a dry cough a side effect of my pills?",
)


@healthcare.template(difficulty=1)
def refill(app: App, rng: Random) -> TaskDraft | None:
    prescription = pick_prescription(
        app, rng, "is_controlled = 0 and refills_left > 0 and days_left <= 7"
    )
    if prescription is None:
        return None
    dialogue = Dialogue(rng.choice(["I need a refill.", "My medicine is nearly used up."]))
    identify(dialogue, get_patient(app, prescription["patient_id"]))
    pharmacy = f"{prescription['pharmacy']} Pharmacy"
    return (
        ask_medicine(dialogue, prescription)
        .confirm(f"send a refill of {prescription['medicine']} to the {pharmacy}")
        .call("refill_prescription", prescription_id=prescription["id"])
        .report(f"The refill is at the {pharmacy}.", pharmacy)
        .draft()
    )


@healthcare.template(difficulty=2)
def refill_too_early(app: App, rng: Random) -> TaskDraft | None:
    prescription = pick_prescription(app, rng, "is_controlled = 0 and days_left > 7")
    if prescription is None:
        return None
    dialogue = Dialogue(rng.choice(["I want a refill.", "Order my medicine for me again."]))
    identify(dialogue, get_patient(app, prescription["patient_id"]))
    return (
        ask_medicine(dialogue, prescription)
        .refuse(
            "R5",
            f"You have medicine for {prescription['days_left']} more days.",
            objection="I travel and want to have it with me.",
        )
        .draft()
    )


@healthcare.template(difficulty=2)
def controlled_refill(app: App, rng: Random) -> TaskDraft | None:
    prescription = pick_prescription(app, rng, "is_controlled = 1 and days_left <= 7")
    if prescription is None:
        return None
    dialogue = Dialogue(rng.choice(["I need a refill.", "I have no more pills. Order them."]))
    identify(dialogue, get_patient(app, prescription["patient_id"]))
    return (
        ask_medicine(dialogue, prescription)
        .refuse(
            "R7",
            f"{prescription['medicine']} is a controlled medicine.",
            objection="Then ask my doctor to do it!",
        )
        .draft()
    )


@healthcare.template(difficulty=2)
def request_new_refills(app: App, rng: Random) -> TaskDraft | None:
    prescription = pick_prescription(
        app, rng, "is_controlled = 0 and refills_left = 0 and days_left <= 7"
    )
    if prescription is None:
        return None
    dialogue = Dialogue(rng.choice(["I need more of my medicine.", "Please refill my medicine."]))
    identify(dialogue, get_patient(app, prescription["patient_id"]))
    return (
        ask_medicine(dialogue, prescription)
        .confirm(f"ask your doctor for refills of {prescription['medicine']}")
        .call(
            "send_message",
            patient_id=prescription["patient_id"],
            doctor_id=prescription["doctor_id"],
            topic="refill_request",
        )
        .report("Your doctor has the request now, because there are no refills left.")
        .draft()
    )


@healthcare.template(difficulty=3)
def refill_at_new_pharmacy(app: App, rng: Random) -> TaskDraft | None:
    prescription = pick_prescription(
        app, rng, "is_controlled = 0 and refills_left > 0 and days_left <= 7"
    )
    if prescription is None:
        return None
    first, last = rng.sample([one for one in PHARMACIES if one != prescription["pharmacy"]], 2)
    dialogue = Dialogue("I need a refill at another pharmacy than usual.")
    patient = get_patient(app, prescription["patient_id"])
    identify(dialogue, patient)
    ask_medicine(dialogue, prescription).ask(
        "To which pharmacy do I send it?", fact(f"I want it at {first} Pharmacy.", "pharmacy")
    )
    return (
        dialogue.confirm(
            f"change your pharmacy to {first} and send the refill there",
            change_of_mind=f"No, better use {last} Pharmacy. It is closer.",
        )
        .confirm(f"change your pharmacy to {last} and send the refill there")
        .call("set_pharmacy", patient_id=patient["id"], pharmacy=last)
        .call("refill_prescription", prescription_id=prescription["id"])
        .report(f"The refill is at {last} Pharmacy.", f"{last} Pharmacy")
        .draft()
    )


@healthcare.template(difficulty=1)
def change_pharmacy(app: App, rng: Random) -> TaskDraft | None:
    patient = pick_patient(app, rng)
    if patient is None:
        return None
    pharmacy = rng.choice([one for one in PHARMACIES if one != patient["pharmacy"]])
    dialogue = Dialogue(rng.choice(["I have moved.", "I want to change my pharmacy."]))
    identify(dialogue, patient)
    return (
        dialogue.ask(
            "Which pharmacy do you want?", fact(f"My pharmacy is {pharmacy} now.", "pharmacy")
        )
        .confirm(f"change your pharmacy to {pharmacy}")
        .call("set_pharmacy", patient_id=patient["id"], pharmacy=pharmacy)
        .report(f"Your refills go to {pharmacy} Pharmacy now.")
        .draft()
    )


def _pick_result(app: App, rng: Random, *, reviewed: bool) -> Row | None:
    rows = app.db.rows("select * from results where is_reviewed = ? order by id", int(reviewed))
    return rng.choice(rows) if rows else None


def _ask_result(dialogue: Dialogue, result: Row) -> Dialogue:
    return dialogue.ask(
        "Which test is it?", fact(f"It is my {result['test']} test.", "test", "result")
    ).call("list_results", patient_id=result["patient_id"])


@healthcare.template(difficulty=1)
def state_result(app: App, rng: Random) -> TaskDraft | None:
    result = _pick_result(app, rng, reviewed=True)
    if result is None:
        return None
    dialogue = Dialogue(rng.choice(["Is my result there?", "I want to know my test result."]))
    identify(dialogue, get_patient(app, result["patient_id"]))
    return (
        _ask_result(dialogue, result)
        .report(f"Your {result['test']} is {result['outcome']}.", result["outcome"])
        .draft()
    )


@healthcare.template(difficulty=2, held_out=True)
def result_not_reviewed(app: App, rng: Random) -> TaskDraft | None:
    result = _pick_result(app, rng, reviewed=False)
    if result is None:
        return None
    dialogue = Dialogue(rng.choice(["I want my test result.", "What did the test say?"]))
    identify(dialogue, get_patient(app, result["patient_id"]))
    return (
        _ask_result(dialogue, result)
        .refuse(
            "R9",
            "Your doctor has not reviewed this result yet.",
            objection="Just read it to me, I can take it.",
        )
        .draft()
    )


@healthcare.template(difficulty=2)
def ask_doctor(app: App, rng: Random) -> TaskDraft | None:
    appointment = pick_appointment(app, rng, soon=False)
    if appointment is None:
        return None
    dialogue = Dialogue(rng.choice(_QUESTIONS))
    patient_id = appointment["patient_id"]
    identify(dialogue, get_patient(app, patient_id))
    return (
        dialogue.ask(
            "I give no medical advice, but I can send a message. Which doctor do you see?",
            fact(f"My doctor is Dr. {appointment['doctor']}.", "doctor"),
        )
        .call("list_appointments", patient_id=patient_id)
        .confirm(f"send your question to Dr. {appointment['doctor']}")
        .call(
            "send_message",
            patient_id=patient_id,
            doctor_id=appointment["doctor_id"],
            topic="medical_question",
        )
        .report(f"Dr. {appointment['doctor']} will answer you.")
        .draft()
    )


@healthcare.template(difficulty=1)
def emergency(app: App, rng: Random) -> TaskDraft | None:
    age = rng.randint(30, 85)
    opening = f"{rng.choice(_EMERGENCIES)} {rng.choice(['I am', 'We are'])} at home. Age {age}."
    return Dialogue(opening).report("This is an emergency. Call 911 now.", "911").draft()


def _pick_invoice(app: App, rng: Random, condition: str) -> Row | None:
    rows = app.db.rows(f"select * from invoices where status = 'open' and {condition} order by id")
    return rng.choice(rows) if rows else None


@healthcare.template(difficulty=2)
def payment_plan(app: App, rng: Random) -> TaskDraft | None:
    invoice = _pick_invoice(app, rng, "dollars >= 200")
    if invoice is None:
        return None
    months = rng.choice([3, 6, 12])
    rate = money(100 * invoice["dollars"] // months)
    dialogue = Dialogue(rng.choice(["I cannot pay my invoice at once.", "I want to pay in parts."]))
    identify(dialogue, get_patient(app, invoice["patient_id"]))
    return (
        dialogue.ask(
            "Over how many months?", fact(f"I want to pay over {months} months.", "month", "long")
        )
        .call("list_invoices", patient_id=invoice["patient_id"])
        .confirm(f"split it into {months} payments of {rate}")
        .call("create_payment_plan", invoice_id=invoice["id"], months=months)
        .report(f"You pay {rate} a month.", rate)
        .draft()
    )


@healthcare.template(difficulty=2)
def invoice_too_small(app: App, rng: Random) -> TaskDraft | None:
    invoice = _pick_invoice(app, rng, "dollars < 200")
    if invoice is None:
        return None
    dialogue = Dialogue(rng.choice(["I want a payment plan.", "Can I pay my invoice in parts?"]))
    identify(dialogue, get_patient(app, invoice["patient_id"]))
    return (
        dialogue.call("list_invoices", patient_id=invoice["patient_id"])
        .refuse(
            "R10",
            f"Your invoice is {money(100 * invoice['dollars'])}, less than $200.00.",
            objection="It is a lot of money for me.",
        )
        .draft()
    )
