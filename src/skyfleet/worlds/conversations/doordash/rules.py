"""The policy of the doordash world."""

BACKGROUND = """\
An order is placed, preparing, picked_up or delivered. late_minutes says how late it was delivered, and \
hours_ago how long ago. A subtotal is the sum of the items. Addresses and restaurants are in zones."""

RULES = {
    "R1": "Before you disclose or change anything, ask for phone number and email address and verify "
    "the customer. If the email is wrong, ask once more. After a second wrong one refuse.",
    "R2": "Items and the address can be changed only while the order is placed.",
    "R3": "An order is delivered only to an address in the zone of its restaurant.",
    "R4": "A placed order is cancelled with a refund of 100 percent, an order in preparation with 50 "
    "percent of the subtotal. State the refund. An order that is picked up or delivered is not "
    "cancelled.",
    "R5": "Missing or wrong items of a delivered order are refunded in full if the delivery was at most "
    "48 hours ago. Later there is no refund.",
    "R6": "A customer with 3 or more refunds in the last 30 days gets no refund of items.",
    "R7": "Alcohol is neither refunded nor added to an order.",
    "R8": "For an order that was delivered at least 30 minutes late give a credit of 5 dollars, from 60 "
    "minutes on of 10 dollars, once per order. Less than 30 minutes gets nothing.",
    "R9": "A promo code is applied only while the order is placed, one per order, and only if the "
    "subtotal is at least the minimum of the code.",
    "R10": "A tip can be raised at any time. It is not lowered after the delivery.",
}
