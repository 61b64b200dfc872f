"""Tables and seeded data of the healthcare world."""

from __future__ import annotations

from datetime import date, timedelta
from random import Random

from skyfleet.worlds.conversations.people import sample_names
from skyfleet.worlds.toolkit import App

SCHEMA = """
create table patients (id text primary key, name text unique, birth_date text, pharmacy text);
create table consents (patient_id text, person text, primary key (patient_id, person));
create table referrals (patient_id text, specialty text, primary key (patient_id, specialty));
create table clinics (id text primary key, name text);
create table doctors (id text primary key, name text, specialty text, clinic_id text);
create table slots (id text primary key, doctor_id text, day text, time text, is_free integer);
create table appointments (id integer primary key, patient_id text, slot_id text, status text);
create table medicines (id text primary key, name text, is_controlled integer);
create table prescriptions (id text primary key, patient_id text, medicine_id text, doctor_id text,
    refills_left integer, days_left integer);
create table refills (id integer primary key, prescription_id text, pharmacy text, day text);
create table results (id text primary key, patient_id text, test text, outcome text,
    is_reviewed integer);
create table invoices (id text primary key, patient_id text, dollars integer, status text);
create table payment_plans (id integer primary key, invoice_id text, months integer);
create table fees (id integer primary key, patient_id text, appointment_id integer, dollars integer);
create table messages (id integer primary key, patient_id text, doctor_id text, topic text);
create table verifications (id integer primary key, patient_id text, day text);
"""

SPECIALTIES = ("general practice", "cardiology", "dermatology", "neurology")
PHARMACIES = ("Corner", "Station", "Park", "River", "Market")
_CLINICS = (("L1", "City"), ("L2", "Lake"), ("L3", "Hill"))
_MEDICINES = (
    ("M1", "Lisinopril", 0),
    ("M2", "Metformin", 0),
    ("M3", "Levothyroxine", 0),
    ("M4", "Atorvastatin", 0),
    ("M5", "Oxycodone", 1),
    ("M6", "Diazepam", 1),
)
_TESTS = {
    "cholesterol": ("182 mg/dL", "214 mg/dL", "247 mg/dL"),
    "iron": ("58 ug/dL", "94 ug/dL", "121 ug/dL"),
    "blood sugar": ("88 mg/dL", "103 mg/dL", "131 mg/dL"),
    "vitamin D": ("14 ng/mL", "27 ng/mL", "41 ng/mL"),
}
_TIMES = ("08:30", "09:15", "10:00", "11:30", "13:45", "14:30", "16:00")
_N_PATIENTS = 6


def fill(app: App, rng: Random) -> None:
    for clinic_id, name in _CLINICS:
        app.db.insert("clinics", id=clinic_id, name=name)
    for medicine_id, name, is_controlled in _MEDICINES:
        app.db.insert("medicines", id=medicine_id, name=name, is_controlled=is_controlled)
    names = sample_names(app, rng, _N_PATIENTS + 8)
    ids = rng.sample(range(100, 999), 60)
    doctors = [
        _add_doctor(app, rng, f"D{ids.pop()}", names.pop(), specialty)
        for specialty in SPECIALTIES
        for _ in range(2)
    ]
    numbers = rng.sample(range(1000, 9999), 60)
    for doctor_id in doctors:
        _fill_slots(app, rng, doctor_id, [f"S{numbers.pop()}" for _ in range(5)])
    patients = [f"T{ids.pop()}" for _ in names]
    for patient_id, name in zip(patients, names, strict=True):
        born = date(rng.randint(1940, 2003), rng.randint(1, 12), rng.randint(1, 28))
        app.db.insert(
            "patients",
            id=patient_id,
            name=name,
            birth_date=born.isoformat(),
            pharmacy=rng.choice(PHARMACIES),
        )
        _fill_record(app, rng, patient_id, ids)
        for doctor_id in rng.sample(doctors, 2):
            _book(app, rng, patient_id, doctor_id)
        if rng.random() < 0.6:
            person = rng.choice([other for other in names if other != name])
            app.db.insert("consents", patient_id=patient_id, person=person)


def _add_doctor(app: App, rng: Random, doctor_id: str, name: str, specialty: str) -> str:
    clinic_id, _ = rng.choice(_CLINICS)
    app.db.insert("doctors", id=doctor_id, name=name, specialty=specialty, clinic_id=clinic_id)
    return doctor_id


def _fill_slots(app: App, rng: Random, doctor_id: str, ids: list[str]) -> None:
    today = date.fromisoformat(app.current_date)
    for slot_id, days in zip(ids, sorted(rng.sample(range(3, 25), len(ids))), strict=True):
        app.db.insert(
            "slots",
            id=slot_id,
            doctor_id=doctor_id,
            day=(today + timedelta(days=days)).isoformat(),
            time=rng.choice(_TIMES),
            is_free=1,
        )


def _book(app: App, rng: Random, patient_id: str, doctor_id: str) -> None:
    """Book a slot of its own, some of them for tomorrow."""
    day = date.fromisoformat(app.current_date) + timedelta(days=rng.choice([1, 1, 4, 6, 9]))
    slot_id = f"S{patient_id[1:]}{doctor_id[1:]}"
    time = rng.choice(_TIMES)
    app.db.insert(
        "slots", id=slot_id, doctor_id=doctor_id, day=day.isoformat(), time=time, is_free=0
    )
    app.db.insert("appointments", patient_id=patient_id, slot_id=slot_id, status="booked")


def _fill_record(app: App, rng: Random, patient_id: str, ids: list[int]) -> None:
    for specialty in rng.sample(SPECIALTIES[1:], rng.choice([0, 1, 2])):
        app.db.insert("referrals", patient_id=patient_id, specialty=specialty)
    doctors = app.db.column("select id from doctors where specialty = ?", SPECIALTIES[0])
    for medicine_id, *_ in rng.sample(_MEDICINES, 3):
        app.db.insert(
            "prescriptions",
            id=f"X{ids.pop()}",
            patient_id=patient_id,
            medicine_id=medicine_id,
            doctor_id=rng.choice(doctors),
            refills_left=rng.choice([0, 1, 2, 3]),
            days_left=rng.choice([0, 2, 5, 7, 12, 20]),
        )
    for test in rng.sample(list(_TESTS), 2):
        app.db.insert(
            "results",
            id=f"E{ids.pop()}",
            patient_id=patient_id,
            test=test,
            outcome=rng.choice(_TESTS[test]),
            is_reviewed=rng.choice([0, 1, 1]),
        )
    app.db.insert(
        "invoices",
        id=f"I{ids.pop()}",
        patient_id=patient_id,
        dollars=12 * rng.randint(5, 70),
        status="open",
    )
