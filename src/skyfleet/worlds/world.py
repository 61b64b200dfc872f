"""World: a schema, seeded data, tools and task templates that one file of its own declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import Any, TypeVar

from skyfleet.envs.tools import ToolFunction
from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds.database import Database
from skyfleet.worlds.toolkit import App, Toolkit
from skyfleet.worlds.vocabulary import FAMILIES, PEOPLE

Seeder = Callable[[App, Random], None]
T = TypeVar("T", bound=ToolFunction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A wish and the calls that fulfil it."""

    prompts: Sequence[str]
    """The same wish in other words; a task has one of them."""
    calls: Sequence[RecordedCall]
    answer: str | None = None
    """For questions: what submit_final_answer is to be given."""
    answer_kind: str = ""
    """Number, name, title: what the prompt asks to be given and nothing else."""
    expected_errors: int = 0
    """Reference calls that fail on purpose, because only the error tells the way."""


Drafter = Callable[[App, Random], Draft | None]
"""Reads the seeded data and drafts a task; None where chance offers nothing fitting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    name: str
    draft: Drafter
    difficulty: int
    held_out: bool
    """Never trained on."""


class World:
    def __init__(self, name: str, schema: str) -> None:
        self.name = name
        self.toolkit = Toolkit()
        self.templates: list[Template] = []
        self._schema = schema
        self._empty: bytes | None = None
        self._fill: Seeder
        self._images: dict[int, bytes] = {}

    def seeder(self, fill: Seeder) -> Seeder:
        self._fill = fill
        return fill

    def reads(self, function: T) -> T:
        """A tool that only looks."""
        self.toolkit.add(function, writes=False)
        return function

    def writes(self, function: T) -> T:
        """A tool that changes something."""
        self.toolkit.add(function, writes=True)
        return function

    def template(self, *, difficulty: int, held_out: bool = False) -> Callable[[Drafter], Drafter]:
        def keep(draft: Drafter) -> Drafter:
            name = draft.__name__
            self.templates.append(
                Template(name=name, draft=draft, difficulty=difficulty, held_out=held_out)
            )
            return draft

        return keep

    def variables(self, data_seed: int) -> dict[str, str]:
        """The env_variables that the data of this seed is made for."""
        rng = Random(f"{self.name}/variables/{data_seed}")
        today = date(2026, 1, 1) + timedelta(days=rng.randrange(365))
        return {"CURRENT_DATE": today.isoformat(), "LOGGED_IN_USER": rng.choice(PEOPLE)}

    def image(self, data_seed: int) -> bytes:
        """The seeded database as bytes, built once while it is in use."""
        if data_seed not in self._images:
            if len(self._images) >= _MOST_IMAGES:
                del self._images[next(iter(self._images))]
            db = Database(self._empty_image())
            db.write("begin")
            app = _app(db, self.variables(data_seed), data_seed)
            self._fill(app, Random(f"{self.name}/{data_seed}"))
            db.write("commit")
            self._images[data_seed] = db.image()
            db.close()
        return self._images[data_seed]

    def _empty_image(self) -> bytes:
        """The tables without rows: parsing a long schema costs as much as filling it."""
        if self._empty is None:
            db = Database()
            # Most tables have few rows, and every episode copies all pages.
            db.write("pragma page_size = 1024")
            db.connection.executescript(self._schema)
            self._empty = db.image()
            db.close()
        return self._empty

    def open(self, data_seed: int, variables: Mapping[str, Any]) -> App:
        """A fresh copy of the seeded data, to be closed by the caller.

        What `variables` leave out is as the data was made for.
        """
        if not variables.keys() >= _VARIABLES:
            variables = {**self.variables(data_seed), **variables}
        return _app(Database(self.image(data_seed)), variables, data_seed)


_VARIABLES = {"CURRENT_DATE", "LOGGED_IN_USER"}
_MOST_IMAGES = 1000
"""Kept in memory, 7 to 37 kB each; a millisecond or two builds one again."""


def call(tool: str, /, **arguments: Any) -> RecordedCall:
    return RecordedCall(name=tool, arguments=arguments)


def _app(db: Database, variables: Mapping[str, Any], data_seed: int) -> App:
    return App(
        db=db,
        current_date=variables["CURRENT_DATE"],
        user=variables["LOGGED_IN_USER"],
        family=data_seed % FAMILIES,
    )
