"""Who calls in the healthcare world, and how an agent identifies them."""

from __future__ import annotations

from datetime import date, timedelta
from random import Random

from skyfleet.worlds.conversations.dialogue import Dialogue, fact
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App

APPOINTMENT = """
select appointments.id, patient_id, slot_id, day, time, doctor_id, doctors.name as doctor, specialty
from appointments join slots on slots.id = slot_id join doctors on doctors.id = doctor_id
where status = 'booked'"""


def pick_patient(app: App, rng: Random, where: str = "1") -> Row | None:
    """Return a patient who fits the SQL condition, or None."""
    rows = app.db.rows(f"select * from patients where {where} order by id")
    return rng.choice(rows) if rows else None


def get_patient(app: App, patient_id: str) -> Row:
    row = app.db.row("select * from patients where id = ?", patient_id)
    assert row is not None
    return row


def pick_appointment(app: App, rng: Random, *, soon: bool) -> Row | None:
    """Return a booked appointment until tomorrow, or a later one."""
    tomorrow = date.fromisoformat(app.current_date) + timedelta(days=1)
    condition = "day <= ?" if soon else "day > ?"
    rows = app.db.rows(f"{APPOINTMENT} and {condition} order by appointments.id", str(tomorrow))
    return rng.choice(rows) if rows else None


def pick_prescription(app: App, rng: Random, where: str) -> Row | None:
    rows = app.db.rows(
        "select prescriptions.*, medicines.name as medicine, pharmacy from prescriptions"
        " join medicines on medicines.id = medicine_id join patients on patients.id = patient_id"
        f" where {where} order by prescriptions.id"
    )
    return rng.choice(rows) if rows else None


def identify(dialogue: Dialogue, patient: Row) -> Dialogue:
    return (
        dialogue.ask(
            "May I have your full name and your date of birth?",
            fact(f"My name is {patient['name']}.", "name"),
            fact(f"I was born on {patient['birth_date']}.", "birth", "born", "birthday"),
        )
        .call("find_patient", name=patient["name"])
        .call("verify_patient", patient_id=patient["id"], birth_date=patient["birth_date"])
    )


def ask_appointment(dialogue: Dialogue, appointment: Row) -> Dialogue:
    return dialogue.ask(
        "Which appointment is it about?",
        fact(f"It is the one with Dr. {appointment['doctor']}.", "appointment", "doctor"),
    ).call("list_appointments", patient_id=appointment["patient_id"])


def ask_medicine(dialogue: Dialogue, prescription: Row) -> Dialogue:
    return dialogue.ask(
        "Which medicine is it?",
        fact(
            f"It is {prescription['medicine']}.", "medicine", "medication", "prescription", "drug"
        ),
    ).call("list_prescriptions", patient_id=prescription["patient_id"])
