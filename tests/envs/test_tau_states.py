"""States are equal exactly if the text that the package hashes is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from skyfleet.envs.tau.states import InitialModels, InitialTables

TABLES: dict[str, Any] = {
    "orders": {"1": {"status": "pending", "price": 10, "items": ["a", "b"]}, "2": {"paid": True}},
    "notes": ["x"],
}


def to_text(record: Any) -> str:
    """As tau-bench: sorted keys, lists as tuples."""
    if isinstance(record, dict):
        return str(sorted((key, to_text(value)) for key, value in record.items()))
    if isinstance(record, list | tuple):
        return str(tuple(map(to_text, record)))
    return repr(record)


@pytest.fixture
def initial() -> InitialTables:
    return InitialTables(TABLES, to_text)


def test_a_copy_has_no_changes_and_shares_nothing(initial: InitialTables) -> None:
    copy = initial.copy()
    assert copy == TABLES
    assert initial.find_changes(copy) == {}
    copy["orders"]["1"]["items"].append("c")
    assert initial.find_changes(initial.copy()) == {}


@pytest.mark.parametrize("value", [10.0, 11, "10", None])
def test_a_value_of_another_type_is_a_change(initial: InitialTables, value: object) -> None:
    copy = initial.copy()
    copy["orders"]["1"]["price"] = value
    assert list(initial.find_changes(copy)) == [("orders", "str 1")]


def test_true_and_one_differ(initial: InitialTables) -> None:
    copy = initial.copy()
    copy["orders"]["2"]["paid"] = 1
    assert list(initial.find_changes(copy)) == [("orders", "str 2")]


def test_another_order_of_keys_and_a_tuple_are_no_changes(initial: InitialTables) -> None:
    copy = initial.copy()
    copy["orders"]["1"] = dict(reversed(copy["orders"]["1"].items()))
    copy["orders"]["1"]["items"] = tuple(copy["orders"]["1"]["items"])
    copy["orders"] = dict(reversed(copy["orders"].items()))
    assert initial.find_changes(copy) == {}


def test_records_come_and_go(initial: InitialTables) -> None:
    copy = initial.copy()
    del copy["orders"]["2"]
    copy["orders"]["3"] = {"paid": False}
    copy["notes"].append("y")
    assert initial.find_changes(copy) == {
        ("orders", "str 2"): None,
        ("orders", "str 3"): to_text({"paid": False}),
        ("notes", ""): to_text(["x", "y"]),
    }


def test_a_record_that_is_changed_back_is_no_change(initial: InitialTables) -> None:
    copy = initial.copy()
    copy["orders"]["1"]["status"] = "cancelled"
    assert initial.find_changes(copy)
    copy["orders"]["1"]["status"] = "pending"
    assert initial.find_changes(copy) == {}


class Order(BaseModel):
    price: float
    tags: list[str] = []


class Shop(BaseModel):
    orders: dict[str, Order]
    open: bool = True


@pytest.fixture
def models() -> InitialModels:
    return InitialModels({"agent": Shop(orders={"1": Order(price=10), "2": Order(price=0.0)})})


def test_a_copy_of_models_has_no_changes(models: InitialModels) -> None:
    copy = models.copy()
    assert models.find_changes(copy) == {}
    copy["agent"].orders["1"].tags.append("late")
    assert list(models.find_changes(copy)) == [("agent.orders", "1")]
    assert models.find_changes(models.copy()) == {}


# What tools assign is not validated, and tau2 hashes it as it is.
@pytest.mark.parametrize(
    ("value", "changes"), [(10.0, False), (10, True), ("10", True), (None, True), (10.5, True)]
)
def test_a_field_of_another_type_is_a_change(
    models: InitialModels, value: Any, changes: bool
) -> None:
    copy = models.copy()
    copy["agent"].orders["1"].price = value
    assert bool(models.find_changes(copy)) is changes
    before = json.dumps(models.copy()["agent"].model_dump(warnings=False), sort_keys=True)
    after = json.dumps(copy["agent"].model_dump(warnings=False), sort_keys=True)
    assert (before != after) is changes


def test_minus_zero_is_not_zero(models: InitialModels) -> None:
    copy = models.copy()
    copy["agent"].orders["2"].price = -0.0
    assert list(models.find_changes(copy)) == [("agent.orders", "2")]


def test_models_come_go_and_other_fields_change(models: InitialModels) -> None:
    copy = models.copy()["agent"]
    del copy.orders["2"]
    copy.orders["3"] = Order(price=1)
    copy.open = False
    changes = models.find_changes({"agent": copy})
    assert changes == {
        ("agent.orders", "2"): None,
        ("agent.orders", "3"): '{"orders": {"3": {"price": 1.0, "tags": []}}}',
        ("agent.open", ""): '{"open": false}',
    }


def test_another_database_in_its_place_is_a_change(models: InitialModels) -> None:
    changes = models.find_changes({"agent": Order(price=1)})
    assert changes == {("agent.", ""): 'Order {"price": 1.0, "tags": []}'}
