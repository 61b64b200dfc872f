"""Tools of the healthcare world, as the front desk uses them."""

from __future__ import annotations

from typing import Literal

from skyfleet.envs.tools import ToolError, check_known, shown
from skyfleet.worlds.conversations.dialogue import money
from skyfleet.worlds.conversations.healthcare.rules import BACKGROUND, RULES
from skyfleet.worlds.conversations.healthcare.tables import PHARMACIES, SCHEMA, SPECIALTIES, fill
from skyfleet.worlds.conversations.world import ConversationWorld
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App

healthcare = ConversationWorld(
    "healthcare", SCHEMA, company="a group of clinics", rules=RULES, background=BACKGROUND
)
healthcare.seeder(fill)


@healthcare.reads
def find_patient(app: App, name: str) -> Row:
    """Find a patient by full name."""
    row = app.db.row(
        "select id as patient_id, pharmacy from patients where name = ? collate nocase", name
    )
    if row is None:
        raise ToolError(f"no patient {shown(name)}; ask for the full name")
    sql = "select {} from {} where patient_id = ? order by 1"
    consents = app.db.column(sql.format("person", "consents"), row["patient_id"])
    referrals = app.db.column(sql.format("specialty", "referrals"), row["patient_id"])
    return {
        **row,
        "consents": ", ".join(consents) or None,
        "referrals": ", ".join(referrals) or None,
    }


@healthcare.writes
def verify_patient(app: App, patient_id: str, birth_date: str) -> str:
    """Verify a patient by date of birth, such as 1970-12-31."""
    if _patient(app, patient_id)["birth_date"] != birth_date:
        raise ToolError("the date of birth is wrong")
    app.db.insert("verifications", patient_id=patient_id, day=app.current_date)
    return "verified"


@healthcare.reads
def list_doctors(
    app: App, specialty: Literal["general practice", "cardiology", "dermatology", "neurology"]
) -> list[Row]:
    """List the doctors of a specialty."""
    check_known("specialty", specialty, SPECIALTIES)
    return app.db.rows(
        "select 'Dr. ' || doctors.name as doctor, doctors.id as doctor_id, clinics.name as clinic"
        " from doctors join clinics on clinics.id = clinic_id where specialty = ?"
        " order by doctors.id",
        specialty,
    )


@healthcare.reads
def list_slots(app: App, doctor_id: str) -> list[Row]:
    """List the free slots of a doctor, earliest first."""
    _doctor(app, doctor_id)
    return app.db.rows(
        "select id as slot_id, day, time from slots where doctor_id = ? and is_free order by day, id",
        doctor_id,
    )


@healthcare.reads
def list_appointments(app: App, patient_id: str) -> list[Row]:
    """List the booked appointments of a patient, next first."""
    _patient(app, patient_id)
    return app.db.rows(
        "select appointments.id as appointment_id, 'Dr. ' || name as doctor, doctors.id as doctor_id,"
        " specialty, day, time from appointments join slots on slots.id = slot_id"
        " join doctors on doctors.id = doctor_id where patient_id = ? and status = 'booked'"
        " order by day, time, appointments.id",
        patient_id,
    )


@healthcare.writes
def book_appointment(app: App, patient_id: str, slot_id: str) -> Row:
    """Book a free slot for a patient."""
    _patient(app, patient_id)
    _take_slot(app, slot_id)
    booked = app.db.insert("appointments", patient_id=patient_id, slot_id=slot_id, status="booked")
    return {"appointment_id": booked}


@healthcare.writes
def move_appointment(app: App, appointment_id: int, slot_id: str) -> None:
    """Move an appointment to a free slot."""
    appointment = _appointment(app, appointment_id)
    _take_slot(app, slot_id)
    app.db.write("update slots set is_free = 1 where id = ?", appointment["slot_id"])
    app.db.write("update appointments set slot_id = ? where id = ?", slot_id, appointment_id)


@healthcare.writes
def cancel_appointment(app: App, appointment_id: int, fee_dollars: int = 0) -> None:
    """Cancel an appointment, and charge a fee for it."""
    appointment = _appointment(app, appointment_id)
    if fee_dollars < 0:
        raise ToolError(f"fee_dollars is {fee_dollars}; give 0 or more")
    app.db.write("update slots set is_free = 1 where id = ?", appointment["slot_id"])
    app.db.write("update appointments set status = 'cancelled' where id = ?", appointment_id)
    if fee_dollars:
        app.db.insert(
            "fees",
            patient_id=appointment["patient_id"],
            appointment_id=appointment_id,
            dollars=fee_dollars,
        )


@healthcare.reads
def list_prescriptions(app: App, patient_id: str) -> list[Row]:
    """List the prescriptions of a patient."""
    _patient(app, patient_id)
    return app.db.rows(
        "select prescriptions.id as prescription_id, name as medicine, refills_left, days_left,"
        " case is_controlled when 1 then 'yes' else 'no' end as controlled, doctor_id"
        " from prescriptions join medicines on medicines.id = medicine_id where patient_id = ?"
        " order by prescriptions.id",
        patient_id,
    )


@healthcare.writes
def refill_prescription(app: App, prescription_id: str) -> str:
    """Send a refill to the patient's pharmacy."""
    row = app.db.row(
        "select * from prescriptions join patients on patients.id = patient_id"
        " where prescriptions.id = ?",
        prescription_id,
    )
    if row is None:
        raise ToolError(f"no prescription {shown(prescription_id)}; list_prescriptions shows them")
    app.db.insert(
        "refills",
        prescription_id=prescription_id,
        pharmacy=row["pharmacy"],
        day=app.current_date,
    )
    sql = "update prescriptions set refills_left = refills_left - 1 where id = ?"
    app.db.write(sql, prescription_id)
    return f"sent to {row['pharmacy']} Pharmacy"


@healthcare.writes
def set_pharmacy(app: App, patient_id: str, pharmacy: str) -> None:
    """Change the pharmacy that gets a patient's refills."""
    _patient(app, patient_id)
    check_known("pharmacy", pharmacy, PHARMACIES)
    app.db.write("update patients set pharmacy = ? where id = ?", pharmacy, patient_id)


@healthcare.reads
def list_results(app: App, patient_id: str) -> list[Row]:
    """List the test results of a patient."""
    _patient(app, patient_id)
    return app.db.rows(
        "select id as result_id, test, outcome, case is_reviewed when 1 then 'yes' else 'no' end"
        " as reviewed from results where patient_id = ? order by id",
        patient_id,
    )


@healthcare.reads
def list_invoices(app: App, patient_id: str) -> list[Row]:
    """List the invoices of a patient."""
    _patient(app, patient_id)
    rows = app.db.rows("select * from invoices where patient_id = ? order by id", patient_id)
    return [
        {"invoice_id": row["id"], "amount": money(100 * row["dollars"]), "status": row["status"]}
        for row in rows
    ]


@healthcare.writes
def create_payment_plan(app: App, invoice_id: str, months: Literal[3, 6, 12]) -> str:
    """Split an open invoice into monthly payments."""
    row = app.db.row("select * from invoices where id = ? and status = 'open'", invoice_id)
    if row is None:
        raise ToolError(f"no open invoice {shown(invoice_id)}; list_invoices shows them")
    app.db.insert("payment_plans", invoice_id=invoice_id, months=months)
    app.db.write("update invoices set status = 'in payment plan' where id = ?", invoice_id)
    return f"{months} payments of {money(100 * row['dollars'] // months)}"


@healthcare.writes
def send_message(
    app: App,
    patient_id: str,
    doctor_id: str,
    topic: Literal["medical_question", "refill_request"],
) -> None:
    """Send a doctor a message about a patient."""
    _patient(app, patient_id)
    _doctor(app, doctor_id)
    app.db.insert("messages", patient_id=patient_id, doctor_id=doctor_id, topic=topic)


def _patient(app: App, patient_id: str) -> Row:
    row = app.db.row("select * from patients where id = ?", patient_id)
    if row is None:
        raise ToolError(f"no patient {shown(patient_id)}; find_patient shows the id")
    return row


def _doctor(app: App, doctor_id: str) -> Row:
    row = app.db.row("select * from doctors where id = ?", doctor_id)
    if row is None:
        raise ToolError(f"no doctor {shown(doctor_id)}; list_doctors shows the ids")
    return row


def _appointment(app: App, appointment_id: int) -> Row:
    sql = "select * from appointments where id = ? and status = 'booked'"
    row = app.db.row(sql, appointment_id)
    if row is None:
        raise ToolError(f"no appointment {appointment_id}; list_appointments shows them")
    return row


def _take_slot(app: App, slot_id: str) -> None:
    if app.db.row("select * from slots where id = ? and is_free", slot_id) is None:
        raise ToolError(f"slot {shown(slot_id)} is not free; list_slots shows the free ones")
    app.db.write("update slots set is_free = 0 where id = ?", slot_id)
