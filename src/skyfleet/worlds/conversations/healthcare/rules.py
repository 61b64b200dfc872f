"""The policy of the healthcare world."""

BACKGROUND = """\
Patients have appointments with doctors of four specialties: general practice, cardiology, dermatology \
and neurology. A prescription has refills left and days left until the medicine is used up. Refills go \
to the patient's pharmacy. Results are reviewed by a doctor before patients get them."""

RULES = {
    "R1": "Before you disclose or change anything, ask for the patient's full name and date of birth "
    "and verify the patient. If the date is wrong, ask once more. After a second wrong date refuse.",
    "R2": "Somebody who calls for another patient is served only if find_patient lists their full name "
    "under consents; ask for it. Then verify with the patient's own name and date of birth. Otherwise "
    "refuse and do not verify.",
    "R3": "An appointment in cardiology, dermatology or neurology needs a referral for that specialty. "
    "General practice needs none.",
    "R4": "An appointment today or tomorrow cannot be moved. It can be cancelled for a fee of 25 "
    "dollars; state the fee. Other appointments are moved and "
    "cancelled free of charge.",
    "R5": "A prescription is refilled only if it has refills left and at most 7 days are left. If more "
    "than 7 days are left, refuse.",
    "R6": "If no refills are left and at most 7 days are left, send the prescribing doctor a message "
    "with the topic refill_request.",
    "R7": "A controlled medicine is never refilled here, and no message is sent for it.",
    "R8": "Give no medical advice. Offer to send the doctor a message with the topic medical_question.",
    "R9": "A result that is not reviewed is not disclosed.",
    "R10": "A payment plan is possible for an open invoice of at least 200 dollars, over 3, 6 or 12 "
    "months. State the amount per month.",
    "R11": "A patient has at most one booked appointment per doctor.",
    "R12": "With signs of an emergency, such as chest pain or trouble breathing, tell the caller at "
    "once to call 911. Do nothing else and ask nothing.",
}
