"""Tools of the doordash world, as a support agent uses them."""

from __future__ import annotations

from skyfleet.envs.tools import ToolError, shown
from skyfleet.worlds.conversations.dialogue import money
from skyfleet.worlds.conversations.doordash.rules import BACKGROUND, RULES
from skyfleet.worlds.conversations.doordash.tables import SCHEMA, fill
from skyfleet.worlds.conversations.world import ConversationWorld
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App

doordash = ConversationWorld(
    "doordash", SCHEMA, company="a food delivery service", rules=RULES, background=BACKGROUND
)
doordash.seeder(fill)


@doordash.reads
def find_customer(app: App, phone: str) -> Row:
    """Find a customer by phone number."""
    row = app.db.row(
        "select id as customer_id, name, refunds_last_30_days from customers where phone = ?", phone
    )
    if row is None:
        raise ToolError(f"no customer with phone {shown(phone)}; ask for the number")
    return row


@doordash.writes
def verify_customer(app: App, customer_id: str, email: str) -> str:
    """Verify a customer by email address."""
    if _customer(app, customer_id)["email"] != email.lower():
        raise ToolError("the email address is wrong")
    app.db.insert("verifications", customer_id=customer_id, day=app.current_date)
    return "verified"


@doordash.reads
def list_orders(app: App, customer_id: str) -> list[Row]:
    """List the orders of a customer."""
    _customer(app, customer_id)
    return app.db.rows(
        "select orders.id as order_id, name as restaurant, status, hours_ago from orders"
        " join restaurants on restaurants.id = restaurant_id where customer_id = ?"
        " order by orders.id",
        customer_id,
    )


@doordash.reads
def get_order(app: App, order_id: str) -> Row:
    """Show an order with its subtotal, tip, address and delivery."""
    _order(app, order_id)
    row = app.db.row(
        "select orders.*, label, restaurants.zone as restaurant_zone, restaurants.id as restaurant"
        " from orders join addresses on addresses.id = address_id"
        " join restaurants on restaurants.id = restaurant_id where orders.id = ?",
        order_id,
    )
    assert row is not None
    return {
        "status": row["status"],
        "eta": row["eta"],
        "late_minutes": row["late_minutes"],
        "hours_ago": row["hours_ago"],
        "subtotal": money(compute_subtotal(app, order_id)),
        "tip": money(100 * row["tip_dollars"]),
        "promo": row["promo"],
        "address": row["label"],
        "restaurant_id": row["restaurant"],
        "restaurant_zone": row["restaurant_zone"],
    }


@doordash.reads
def list_items(app: App, order_id: str) -> list[Row]:
    """List the items of an order."""
    _order(app, order_id)
    rows = app.db.rows(
        "select * from order_items join menu_items on id = item_id where order_id = ? order by id",
        order_id,
    )
    return [_show_item(row) | {"quantity": row["quantity"]} for row in rows]


@doordash.reads
def list_menu(app: App, restaurant_id: str) -> list[Row]:
    """List what a restaurant sells."""
    rows = app.db.rows(
        "select * from menu_items where restaurant_id = ? order by id", restaurant_id
    )
    if not rows:
        raise ToolError(f"no restaurant {shown(restaurant_id)}; get_order shows the id")
    return [_show_item(row) for row in rows]


@doordash.reads
def list_addresses(app: App, customer_id: str) -> list[Row]:
    """List the addresses of a customer."""
    _customer(app, customer_id)
    return app.db.rows(
        "select label, id as address_id, street, zone from addresses where customer_id = ?"
        " order by id",
        customer_id,
    )


@doordash.reads
def list_promos(app: App, customer_id: str) -> list[Row]:
    """List the promo codes that a customer may use."""
    _customer(app, customer_id)
    rows = app.db.rows(
        "select * from promos where code in (select code from customer_promos where customer_id = ?)"
        " order by code",
        customer_id,
    )
    return [
        {"code": row["code"], "percent": row["percent"], "minimum": money(row["minimum_cents"])}
        for row in rows
    ]


@doordash.writes
def change_item(app: App, order_id: str, item_id: str, quantity: int) -> str:
    """Set how many of an item are in an order; 0 removes it."""
    order = _order(app, order_id)
    sql = "select * from menu_items where id = ? and restaurant_id = ?"
    if app.db.row(sql, item_id, order["restaurant_id"]) is None:
        raise ToolError(f"no item {shown(item_id)} of this restaurant; list_menu shows them")
    if not 0 <= quantity <= 20:
        raise ToolError(f"quantity is {quantity}; choose from 0 to 20")
    sql = "delete from order_items where order_id = ? and item_id = ?"
    app.db.write(sql, order_id, item_id)
    if quantity:
        app.db.insert("order_items", order_id=order_id, item_id=item_id, quantity=quantity)
    return f"subtotal {money(compute_subtotal(app, order_id))}"


@doordash.writes
def change_address(app: App, order_id: str, address_id: str) -> None:
    """Deliver an order to another address of the customer."""
    order = _order(app, order_id)
    sql = "select * from addresses where id = ? and customer_id = ?"
    if app.db.row(sql, address_id, order["customer_id"]) is None:
        raise ToolError(f"no address {shown(address_id)}; list_addresses shows them")
    app.db.write("update orders set address_id = ? where id = ?", address_id, order_id)


@doordash.writes
def cancel_order(app: App, order_id: str, refund_percent: int) -> str:
    """Cancel an order and refund a share of its subtotal."""
    if _order(app, order_id)["status"] == "cancelled":
        raise ToolError(f"order {order_id} is cancelled already")
    if not 0 <= refund_percent <= 100:
        raise ToolError(f"refund_percent is {refund_percent}; choose from 0 to 100")
    cents = compute_subtotal(app, order_id) * refund_percent // 100
    app.db.write("update orders set status = 'cancelled' where id = ?", order_id)
    app.db.insert("order_refunds", order_id=order_id, percent=refund_percent, amount_cents=cents)
    return f"refunded {money(cents)}"


@doordash.writes
def refund_item(app: App, order_id: str, item_id: str, quantity: int) -> str:
    """Refund items of an order."""
    _order(app, order_id)
    row = app.db.row(
        "select * from order_items join menu_items on id = item_id where order_id = ? and item_id = ?",
        order_id,
        item_id,
    )
    if row is None:
        raise ToolError(f"no item {shown(item_id)} in this order; list_items shows them")
    if not 1 <= quantity <= row["quantity"]:
        raise ToolError(f"quantity is {quantity}; choose from 1 to {row['quantity']}")
    cents = quantity * row["price_cents"]
    app.db.insert(
        "item_refunds", order_id=order_id, item_id=item_id, quantity=quantity, amount_cents=cents
    )
    return f"refunded {money(cents)}"


@doordash.writes
def give_credit(app: App, order_id: str, dollars: int) -> str:
    """Give the customer of an order a credit because it was late."""
    order = _order(app, order_id)
    if dollars <= 0:
        raise ToolError(f"dollars is {dollars}; give a positive number")
    app.db.insert("credits", customer_id=order["customer_id"], order_id=order_id, dollars=dollars)
    app.db.write("update orders set late_credit = 1 where id = ?", order_id)
    return f"credited {money(100 * dollars)}"


@doordash.writes
def apply_promo(app: App, order_id: str, code: str) -> None:
    """Apply a promo code of the customer to an order."""
    order = _order(app, order_id)
    sql = "select * from customer_promos where customer_id = ? and code = ?"
    if app.db.row(sql, order["customer_id"], code) is None:
        raise ToolError(f"no promo code {shown(code)}; list_promos shows them")
    app.db.write("update orders set promo = ? where id = ?", code, order_id)


@doordash.writes
def change_tip(app: App, order_id: str, dollars: int) -> None:
    """Change the tip of an order."""
    _order(app, order_id)
    if not 0 <= dollars <= 100:
        raise ToolError(f"dollars is {dollars}; choose from 0 to 100")
    app.db.write("update orders set tip_dollars = ? where id = ?", dollars, order_id)


def compute_subtotal(app: App, order_id: str) -> int:
    """Return the sum of the items in cents."""
    sql = "select quantity * price_cents from order_items join menu_items on id = item_id"
    return sum(app.db.column(f"{sql} where order_id = ?", order_id))


def _show_item(row: Row) -> Row:
    return {
        "item": row["name"],
        "item_id": row["id"],
        "price": money(row["price_cents"]),
        "alcohol": "yes" if row["is_alcohol"] else "no",
    }


def _customer(app: App, customer_id: str) -> Row:
    row = app.db.row("select * from customers where id = ?", customer_id)
    if row is None:
        raise ToolError(f"no customer {shown(customer_id)}; find_customer shows the id")
    return row


def _order(app: App, order_id: str) -> Row:
    row = app.db.row("select * from orders where id = ?", order_id)
    if row is None:
        raise ToolError(f"no order {shown(order_id)}; list_orders shows the ids")
    return row
