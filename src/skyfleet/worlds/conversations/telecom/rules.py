"""The policy of the telecom world."""

BACKGROUND = """\
Customers have lines, which are phone numbers. Each line has a plan, a device and add-ons. months_left \
counts the months of a line's contract. A bill is due, overdue or paid; its late fee is part of the \
amount. Plans are charged monthly."""

RULES = {
    "R1": "Before you disclose or change anything, ask for full name and PIN and verify the customer. "
    "If the PIN is wrong, ask once more. After a second wrong PIN refuse.",
    "R2": "Only the account holder is served. Refuse anybody who calls for somebody else, and do not "
    "verify them, even if they know the PIN.",
    "R3": "A line with months left cannot change to a plan with a lower price.",
    "R4": "A customer with an overdue bill gets no plan change and no add-on. Offer to take the payment "
    "first; then the change is possible.",
    "R5": "Bills are paid in full with a card on file that has not expired. If the chosen card has "
    "expired, refuse that card. Never ask for a card number.",
    "R6": "For an ended outage in the customer's area give a credit of kind outage: 5 dollars per full "
    "24 hours, at most 20 dollars. A shorter outage gets nothing.",
    "R7": "A late fee is given back as a credit of kind late_fee, in full dollars, if the customer has "
    "been with us for at least 1 year and the last waiver is at least 12 months ago (none is one that "
    "never happened). Otherwise refuse.",
    "R8": "A device is unlocked only when no installments are left.",
    "R9": "The line of a lost or stolen phone is suspended.",
    "R10": "Cancelling a line with months left costs 10 dollars per month left. State the fee and the "
    "customer must agree. The only active line of a customer is never cancelled in a chat.",
    "R11": "When a line does not work, look for an open outage in the area first. If there is one, "
    "state its expected end and open no ticket. Otherwise open a ticket.",
}
