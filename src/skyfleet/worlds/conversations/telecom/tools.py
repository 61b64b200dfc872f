"""Tools of the telecom world, as a support agent uses them."""

from __future__ import annotations

from typing import Literal

from skyfleet.envs.tools import ToolError, check_known, shown
from skyfleet.worlds.conversations.dialogue import money
from skyfleet.worlds.conversations.telecom.rules import BACKGROUND, RULES
from skyfleet.worlds.conversations.telecom.tables import AREAS, SCHEMA, fill
from skyfleet.worlds.conversations.world import ConversationWorld
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App

telecom = ConversationWorld(
    "telecom", SCHEMA, company="a mobile phone company", rules=RULES, background=BACKGROUND
)
telecom.seeder(fill)


@telecom.reads
def find_customer(app: App, name: str) -> Row:
    """Find a customer by full name."""
    row = app.db.row(
        "select id as customer_id, area, customer_years, months_since_waiver from customers"
        " where name = ? collate nocase",
        name,
    )
    if row is None:
        raise ToolError(f"no customer {shown(name)}; ask for the full name")
    return row


@telecom.writes
def verify_customer(app: App, customer_id: str, pin: str) -> str:
    """Verify a customer by PIN."""
    row = _customer(app, customer_id)
    if row["pin"] != pin:
        raise ToolError("the PIN is wrong")
    app.db.insert("verifications", customer_id=customer_id, day=app.current_date)
    return "verified"


@telecom.reads
def list_lines(app: App, customer_id: str) -> list[Row]:
    """List the lines of a customer with plan, contract, data use of last month and device."""
    _customer(app, customer_id)
    return app.db.rows(
        "select number as line, plans.name as plan, status, months_left, used_gb, model as device,"
        " installments_left from lines join plans on plans.id = plan_id"
        " join devices on devices.line = number where customer_id = ? order by number",
        customer_id,
    )


@telecom.reads
def list_plans(app: App) -> list[Row]:
    """List all plans, cheapest first."""
    plans = app.db.rows("select * from plans order by monthly_cents")
    return [
        {
            "plan": plan["name"],
            "plan_id": plan["id"],
            "monthly": money(plan["monthly_cents"]),
            "data_gb": plan["data_gb"],
        }
        for plan in plans
    ]


@telecom.reads
def list_bills(app: App, customer_id: str) -> list[Row]:
    """List the bills of a customer, newest first."""
    _customer(app, customer_id)
    bills = app.db.rows(
        "select * from bills where customer_id = ? order by due desc, id", customer_id
    )
    return [
        {
            "bill_id": bill["id"],
            "month": bill["month"],
            "amount": money(bill["amount_cents"]),
            "late_fee": money(bill["late_fee_cents"]),
            "due": bill["due"],
            "status": bill["status"],
        }
        for bill in bills
    ]


@telecom.reads
def list_cards(app: App, customer_id: str) -> list[Row]:
    """List the payment cards on file."""
    _customer(app, customer_id)
    return app.db.rows(
        "select kind as card, id as card_id, case is_expired when 1 then 'yes' else 'no' end"
        " as expired from cards where customer_id = ? order by id",
        customer_id,
    )


@telecom.reads
def list_addons(app: App, line: str) -> list[Row]:
    """List all add-ons, and whether the line has them."""
    _line(app, line)
    rows = app.db.rows(
        "select name, id, monthly_cents, exists (select 1 from line_addons where line = ?"
        " and addon_id = id) as active from addons order by id",
        line,
    )
    return [
        {
            "addon": row["name"],
            "addon_id": row["id"],
            "monthly": money(row["monthly_cents"]),
            "active": "yes" if row["active"] else "no",
        }
        for row in rows
    ]


@telecom.reads
def list_outages(app: App, area: str) -> list[Row]:
    """List open and ended outages of an area."""
    check_known("area", area, AREAS)
    return app.db.rows(
        "select id as outage_id, status, hours, expected_end from outages where area = ?", area
    )


@telecom.writes
def pay_bill(app: App, bill_id: str, card_id: str) -> str:
    """Pay a bill in full with a card on file."""
    bill = app.db.row("select * from bills where id = ?", bill_id)
    if bill is None or bill["status"] == "paid":
        raise ToolError(f"no unpaid bill {shown(bill_id)}; list_bills shows them")
    card = app.db.row("select * from cards where id = ?", card_id)
    if card is None or card["customer_id"] != bill["customer_id"]:
        raise ToolError(f"no card {shown(card_id)} of this customer; list_cards shows them")
    amount = bill["amount_cents"]
    app.db.insert("payments", bill_id=bill_id, card_id=card_id, amount_cents=amount)
    app.db.write("update bills set status = 'paid' where id = ?", bill_id)
    return f"paid {money(amount)}"


@telecom.writes
def change_plan(app: App, line: str, plan_id: str) -> None:
    """Change the plan of a line."""
    check_known("plan", plan_id, app.db.column("select id from plans order by id"))
    if _line(app, line)["plan_id"] == plan_id:
        raise ToolError(f"line {line} has plan {plan_id} already")
    app.db.write("update lines set plan_id = ? where number = ?", plan_id, line)


@telecom.writes
def change_addon(app: App, line: str, addon_id: str, action: Literal["add", "remove"]) -> None:
    """Add an add-on to a line, or remove it."""
    _line(app, line)
    check_known("add-on", addon_id, app.db.column("select id from addons order by id"))
    sql = "select * from line_addons where line = ? and addon_id = ?"
    if (app.db.row(sql, line, addon_id) is not None) == (action == "add"):
        raise ToolError(f"cannot {action}: list_addons shows what the line has")
    if action == "add":
        app.db.insert("line_addons", line=line, addon_id=addon_id)
    else:
        app.db.write("delete from line_addons where line = ? and addon_id = ?", line, addon_id)


@telecom.writes
def set_line_status(
    app: App, line: str, status: Literal["active", "suspended", "cancelled"]
) -> None:
    """Suspend, reactivate or cancel a line."""
    if _line(app, line)["status"] == status:
        raise ToolError(f"line {line} is {status} already")
    app.db.write("update lines set status = ? where number = ?", status, line)


@telecom.writes
def unlock_device(app: App, line: str) -> None:
    """Unlock the device of a line for other networks."""
    _line(app, line)
    app.db.write("update devices set locked = 0 where line = ?", line)


@telecom.writes
def give_credit(
    app: App, customer_id: str, kind: Literal["outage", "late_fee"], dollars: int
) -> str:
    """Give a customer a credit on the next bill."""
    _customer(app, customer_id)
    if dollars <= 0:
        raise ToolError(f"dollars is {dollars}; give a positive number")
    app.db.insert("credits", customer_id=customer_id, kind=kind, dollars=dollars)
    return f"credited {money(100 * dollars)}"


@telecom.writes
def open_ticket(
    app: App, line: str, problem: Literal["no_signal", "slow_data", "dropped_calls"]
) -> Row:
    """Open a ticket for the technicians."""
    _line(app, line)
    opened = app.db.insert("tickets", line=line, problem=problem, opened=app.current_date)
    return {"ticket_id": opened}


def _customer(app: App, customer_id: str) -> Row:
    row = app.db.row("select * from customers where id = ?", customer_id)
    if row is None:
        raise ToolError(f"no customer {shown(customer_id)}; find_customer shows the id")
    return row


def _line(app: App, line: str) -> Row:
    row = app.db.row("select * from lines where number = ?", line)
    if row is None:
        raise ToolError(f"no line {shown(line)}; list_lines shows the numbers")
    return row
