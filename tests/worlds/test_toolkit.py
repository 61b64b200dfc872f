"""A typed function becomes a tool with a schema, error messages and rollback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import pytest
from pydantic import Field

from skyfleet.envs.tools import ToolError
from skyfleet.errors import EnvError
from skyfleet.worlds.database import Database
from skyfleet.worlds.toolkit import App, Toolkit, show


def rename_pet(
    app: App,
    number: Annotated[int, Field(description="from a listing")],
    name: str,
    mood: Literal["good", "bad"] | None = None,
) -> None:
    """Rename a pet."""
    app.db.write("update pets set name = ? where number = ?", name, number)
    if mood == "bad":
        raise ToolError("bad moods are not kept")


@pytest.fixture
def toolkit() -> Toolkit:
    toolkit = Toolkit()
    toolkit.add(rename_pet, writes=True)
    return toolkit


@pytest.fixture
def app() -> Iterator[App]:
    db = Database()
    db.write("create table pets (number integer primary key, name text)")
    db.insert("pets", number=1, name="rex")
    yield App(db=db, current_date="2026-03-02", user="amy")
    db.close()


def test_the_schema_matches_the_function_signature(toolkit: Toolkit) -> None:
    (spec,) = toolkit.specs
    assert (spec.name, spec.description) == ("rename_pet", "Rename a pet.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "number": {"type": "integer", "description": "from a listing"},
            "name": {"type": "string"},
            "mood": {"type": "string", "enum": ["good", "bad"]},
        },
        "required": ["number", "name"],
    }


def test_a_valid_call_works_and_null_means_not_given(toolkit: Toolkit, app: App) -> None:
    toolkit.call(app, "rename_pet", {"number": 1, "name": "max", "mood": None})
    assert app.db.column("select name from pets") == ["max"]


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("rename", {}, "no tool 'rename'; tools: rename_pet"),
        ("rename_pet", {"number": 1}, "rename_pet needs name; it takes number, name, mood"),
        ("rename_pet", {"number": 1, "name": "x", "age": 3}, "rename_pet has no 'age'"),
        ("rename_pet", {"number": "1", "name": "x"}, "number is '1'; input should be a valid int"),
        ("rename_pet", {"number": True, "name": "x"}, "number is True; input should be"),
        ("rename_pet", {"number": 2**63, "name": "x"}, "number is too large a number"),
        ("rename_pet", {"number": 10**5000, "name": "x"}, "number is too large a number"),
        ("rename_pet", {"number": 1, "name": ["x"]}, "name is an array; input should be"),
        ("rename_pet", {"number": 1, "name": "x", "mood": "odd"}, "should be 'good' or 'bad'"),
        ("rename_pet", {"number": 1, "name": "\ud800"}, r"name is '\ud800'; write it without"),
        ("rename_pet", {"number": 1, "name": "x", "\ud800": 1}, "rename_pet has no"),
        ("rename_pet", {"number": 1, "name": "x", "mood": "bad"}, "bad moods are not kept"),
    ],
)
def test_an_invalid_call_names_the_remedy_and_changes_nothing(
    toolkit: Toolkit, app: App, name: str, arguments: dict[str, object], complaint: str
) -> None:
    before = list(app.db.connection.iterdump())
    with pytest.raises(ToolError) as error:
        toolkit.call(app, name, arguments)
    assert complaint in str(error.value)
    assert str(error.value).encode()
    assert list(app.db.connection.iterdump()) == before
    assert not app.db.connection.in_transaction


def test_an_error_shortens_long_values(toolkit: Toolkit, app: App) -> None:
    with pytest.raises(ToolError) as error:
        toolkit.call(app, "rename_pet", {"number": "9" * 10_000, "name": "x"})
    assert len(str(error.value)) < 150


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "ok"),
        (0, "0"),
        ([], "[]"),
        ("", '""'),
        ({"id": 3, "name": None}, "id: 3\nname: none"),
        ([{"id": 3, "name": "amy"}, {"id": 4, "name": "a\nb"}], "id,name\n3,amy\n4,a b"),
        ([{"id": n} for n in range(7)], "id\n0\n1\n2\n3\n4\n2 more"),
    ],
)
def test_results_are_formatted_as_short_text(result: object, text: str) -> None:
    assert show(result) == text


def test_a_read_only_tool_that_writes_raises_an_env_error(app: App) -> None:
    def adopt(app: App) -> None:
        """Look at the pets."""
        app.db.insert("pets", number=2, name="tom")

    toolkit = Toolkit()
    toolkit.add(adopt, writes=False)
    with pytest.raises(EnvError, match="has written rows"):
        toolkit.call(app, "adopt", {})
