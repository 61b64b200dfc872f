"""Healthcare tasks about appointments."""

from __future__ import annotations

from random import Random

from skyfleet.worlds.conversations.dialogue import Dialogue, fact
from skyfleet.worlds.conversations.healthcare.callers import (
    APPOINTMENT,
    ask_appointment,
    get_patient,
    identify,
    pick_appointment,
    pick_patient,
)
from skyfleet.worlds.conversations.healthcare.tables import SPECIALTIES
from skyfleet.worlds.conversations.healthcare.tools import healthcare
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft


def _pick_doctor(app: App, rng: Random, specialty: str, patient: Row) -> Row | None:
    """Return a doctor with whom the patient has no appointment."""
    rows = app.db.rows(
        "select * from doctors where specialty = ? and id not in (select doctor_id from"
        " appointments join slots on slots.id = slot_id where patient_id = ? and status = 'booked')"
        " order by id",
        specialty,
        patient["id"],
    )
    return rng.choice(rows) if rows else None


def _slots(app: App, doctor_id: str) -> list[Row]:
    sql = "select * from slots where doctor_id = ? and is_free order by day, id"
    return app.db.rows(sql, doctor_id)


def _ask_doctor(dialogue: Dialogue, doctor: Row) -> Dialogue:
    return dialogue.ask(
        "Which doctor do you want to see?",
        fact(f"I want to see Dr. {doctor['name']}.", "doctor", "who", "physician"),
        fact(f"The specialty is {doctor['specialty']}.", "specialty", "department", "doctor"),
    ).call("list_doctors", specialty=doctor["specialty"])


@healthcare.template(difficulty=1)
def state_appointment(app: App, rng: Random) -> TaskDraft | None:
    appointment = pick_appointment(app, rng, soon=False)
    if appointment is None:
        return None
    dialogue = Dialogue(
        rng.choice(["When is my appointment?", "I forgot the time of my appointment."])
    )
    identify(dialogue, get_patient(app, appointment["patient_id"]))
    day, time = appointment["day"], appointment["time"]
    return (
        ask_appointment(dialogue, appointment)
        .report(f"Your appointment is on {day} at {time}.", day, time)
        .draft()
    )


@healthcare.template(difficulty=1)
def cancel_in_time(app: App, rng: Random) -> TaskDraft | None:
    appointment = pick_appointment(app, rng, soon=False)
    if appointment is None:
        return None
    dialogue = Dialogue(
        rng.choice(["I have to cancel an appointment.", "I cannot come. Cancel it."])
    )
    identify(dialogue, get_patient(app, appointment["patient_id"]))
    return (
        ask_appointment(dialogue, appointment)
        .confirm(f"cancel the appointment on {appointment['day']}, free of charge")
        .call("cancel_appointment", appointment_id=appointment["id"])
        .report("The appointment is cancelled.")
        .draft()
    )


@healthcare.template(difficulty=2)
def book_first_slot(app: App, rng: Random) -> TaskDraft | None:
    patient = pick_patient(app, rng)
    doctor = _pick_doctor(app, rng, SPECIALTIES[0], patient) if patient else None
    if patient is None or doctor is None:
        return None
    slot = _slots(app, doctor["id"])[0]
    dialogue = Dialogue(
        rng.choice(["I need an appointment as early as possible.", "I want the first free slot."])
    )
    identify(dialogue, patient)
    return _book(_ask_doctor(dialogue, doctor), patient, slot).draft()


def _book(dialogue: Dialogue, patient: Row, slot: Row) -> Dialogue:
    day, time = slot["day"], slot["time"]
    return (
        dialogue.call("list_appointments", patient_id=patient["id"])
        .call("list_slots", doctor_id=slot["doctor_id"])
        .confirm(f"book {day} at {time}")
        .call("book_appointment", patient_id=patient["id"], slot_id=slot["id"])
        .report(f"Your appointment is on {day} at {time}.", day, time)
    )


@healthcare.template(difficulty=3)
def book_specialist_on_day(app: App, rng: Random) -> TaskDraft | None:
    patient = pick_patient(app, rng, "id in (select patient_id from referrals)")
    if patient is None:
        return None
    specialty = rng.choice(
        app.db.column("select specialty from referrals where patient_id = ?", patient["id"])
    )
    doctor = _pick_doctor(app, rng, specialty, patient)
    if doctor is None:
        return None
    slot = rng.choice(_slots(app, doctor["id"])[1:])
    dialogue = Dialogue(rng.choice(["I need to see a specialist.", "I want a new appointment."]))
    identify(dialogue, patient)
    _ask_doctor(dialogue, doctor).ask(
        "On what day do you want to come?",
        fact(f"I can only come on {slot['day']}.", "day", "date", "when"),
    )
    return _book(dialogue, patient, slot).draft()


@healthcare.template(difficulty=2)
def no_referral(app: App, rng: Random) -> TaskDraft | None:
    patient = pick_patient(app, rng)
    if patient is None:
        return None
    held = app.db.column("select specialty from referrals where patient_id = ?", patient["id"])
    missing = [one for one in SPECIALTIES[1:] if one not in held]
    doctor = _pick_doctor(app, rng, rng.choice(missing), patient) if missing else None
    if doctor is None:
        return None
    dialogue = Dialogue(rng.choice(["I want to see a specialist.", "Book me an appointment."]))
    identify(dialogue, patient)
    return (
        _ask_doctor(dialogue, doctor)
        .refuse(
            "R3",
            f"You have no referral for {doctor['specialty']}.",
            objection="I will bring the referral with me.",
        )
        .draft()
    )


@healthcare.template(difficulty=3)
def cancel_for_a_fee(app: App, rng: Random) -> TaskDraft | None:
    appointment = pick_appointment(app, rng, soon=True)
    if appointment is None:
        return None
    dialogue = Dialogue(rng.choice(["I cannot come to my appointment.", "Cancel my appointment."]))
    identify(dialogue, get_patient(app, appointment["patient_id"]))
    return (
        ask_appointment(dialogue, appointment)
        .confirm("cancel the appointment for a fee of $25.00, because it is so soon")
        .call("cancel_appointment", appointment_id=appointment["id"], fee_dollars=25)
        .report("The appointment is cancelled, and the fee is $25.00.", "$25.00")
        .draft()
    )


@healthcare.template(difficulty=3)
def keep_instead_of_fee(app: App, rng: Random) -> TaskDraft | None:
    """The user takes the wish back when it hears of the fee: nothing may be cancelled."""
    appointment = pick_appointment(app, rng, soon=True)
    later = pick_appointment(app, rng, soon=False)
    if appointment is None or later is None or later["patient_id"] != appointment["patient_id"]:
        return None
    dialogue = Dialogue("I want to cancel an appointment.")
    identify(dialogue, get_patient(app, appointment["patient_id"]))
    return (
        ask_appointment(dialogue, appointment)
        .confirm(
            "cancel that appointment for a fee of $25.00",
            change_of_mind=(
                f"Then I keep it. Cancel the one with Dr. {later['doctor']} on {later['day']} instead."
            ),
        )
        .confirm(f"cancel the appointment on {later['day']}, free of charge")
        .call("cancel_appointment", appointment_id=later["id"])
        .report(f"I have cancelled the appointment on {later['day']}.")
        .draft()
    )


@healthcare.template(difficulty=2)
def too_late_to_move(app: App, rng: Random) -> TaskDraft | None:
    appointment = pick_appointment(app, rng, soon=True)
    if appointment is None:
        return None
    dialogue = Dialogue(rng.choice(["I want to come later.", "Please move my appointment."]))
    identify(dialogue, get_patient(app, appointment["patient_id"]))
    return (
        ask_appointment(dialogue, appointment)
        .refuse(
            "R4",
            f"Your appointment is on {appointment['day']}, too soon to be moved.",
            objection="Nobody said that to me when I booked it.",
        )
        .draft()
    )


@healthcare.template(difficulty=3)
def move_with_second_thoughts(app: App, rng: Random) -> TaskDraft | None:
    appointment = pick_appointment(app, rng, soon=False)
    if appointment is None:
        return None
    first, last = rng.sample(_slots(app, appointment["doctor_id"]), 2)
    dialogue = Dialogue(
        rng.choice(["I need to move my appointment.", "Another day suits me better."])
    )
    identify(dialogue, get_patient(app, appointment["patient_id"]))
    ask_appointment(dialogue, appointment).ask(
        "To what day?", fact(f"Move it to {first['day']}.", "day", "date", "when")
    )
    return (
        dialogue.call("list_slots", doctor_id=appointment["doctor_id"])
        .confirm(
            f"move it to {first['day']} at {first['time']}",
            change_of_mind=f"Sorry, that does not work for me. Take {last['day']} instead.",
        )
        .confirm(f"move it to {last['day']} at {last['time']}")
        .call("move_appointment", appointment_id=appointment["id"], slot_id=last["id"])
        .report(f"It is on {last['day']} at {last['time']} now.", last["day"], last["time"])
        .draft()
    )


@healthcare.template(difficulty=3, held_out=True)
def second_appointment(app: App, rng: Random) -> TaskDraft | None:
    rows = app.db.rows(f"{APPOINTMENT} and specialty = ? order by appointments.id", SPECIALTIES[0])
    if not rows:
        return None
    appointment = rng.choice(rows)
    doctor = {"name": appointment["doctor"], "specialty": appointment["specialty"]}
    dialogue = Dialogue("I want one more appointment.")
    identify(dialogue, get_patient(app, appointment["patient_id"]))
    return (
        _ask_doctor(dialogue, doctor)
        .call("list_appointments", patient_id=appointment["patient_id"])
        .refuse(
            "R11",
            f"You already have an appointment with Dr. {doctor['name']}.",
            objection="So what?",
        )
        .draft()
    )


@healthcare.template(difficulty=3)
def cancel_for_relative(app: App, rng: Random) -> TaskDraft | None:
    appointment = pick_appointment(app, rng, soon=False)
    if appointment is None:
        return None
    patient = get_patient(app, appointment["patient_id"])
    people = app.db.column("select person from consents where patient_id = ?", patient["id"])
    who = rng.choice(["my wife", "my husband", "my mother"])
    dialogue = Dialogue(f"I call for {who}, {patient['name']}, to cancel an appointment.")
    if not people:
        caller = rng.choice(app.db.column("select name from patients order by id"))
        if caller == patient["name"]:
            return None
        return (
            _ask_caller(dialogue, caller, patient)
            .refuse("R2", "There is no consent for you.", objection="We are a family!")
            .draft()
        )
    return (
        _ask_caller(dialogue, people[0], patient)
        .ask(
            "What is the date of birth of the patient?",
            fact(f"The patient was born on {patient['birth_date']}.", "birth", "born", "birthday"),
        )
        .call("verify_patient", patient_id=patient["id"], birth_date=patient["birth_date"])
        .ask(
            "Which appointment is it about?",
            fact(f"It is the one with Dr. {appointment['doctor']}.", "appointment", "doctor"),
        )
        .call("list_appointments", patient_id=patient["id"])
        .confirm(f"cancel the appointment on {appointment['day']}, free of charge")
        .call("cancel_appointment", appointment_id=appointment["id"])
        .report("The appointment is cancelled.")
        .draft()
    )


def _ask_caller(dialogue: Dialogue, caller: str, patient: Row) -> Dialogue:
    return dialogue.ask(
        "May I have your own full name?", fact(f"My own name is {caller}.", "name")
    ).call("find_patient", name=patient["name"])
