"""World: the schema, seeded data, tools and task templates that one module declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from random import Random
from typing import Any, TypeVar

from skyfleet.envs.tools import ToolFunction
from skyfleet.envs.verifiers.replies import RequiredReplies
from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds.database import Database
from skyfleet.worlds.toolkit import App, Toolkit
from skyfleet.worlds.vocabulary import FAMILIES, PEOPLE

Seeder = Callable[[App, Random], None]
T = TypeVar("T", bound=ToolFunction)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDraft:
    """An instruction, the tool calls that carry it out, and the expected answer."""

    prompts: Sequence[str]
    """Paraphrases of the instruction; a task uses one of them."""
    calls: Sequence[RecordedCall]
    answer: str | None = None
    """For questions: the expected argument of submit_final_answer."""
    answer_kind: str = ""
    """What kind of answer the prompt asks for, such as number, name or title."""
    expected_errors: int = 0
    """Number of reference calls that fail on purpose, because the error says how to continue."""
    replies: RequiredReplies | None = None
    """In a conversation: what the agent's messages must hold."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """More values for the `metadata` of the task."""


TaskGenerator = Callable[[App, Random], TaskDraft | None]
"""Reads the seeded data and drafts a task; returns None if the random draw fits no task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    name: str
    generate: TaskGenerator
    difficulty: int
    held_out: bool
    """Excluded from training, used by the split unseen_templates."""


class World:
    composes = True
    """Whether two templates may be composed into one task."""

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
        """Register a tool that only reads the database."""
        self.toolkit.add(function, writes=False)
        return function

    def writes(self, function: T) -> T:
        """Register a tool that may write to the database."""
        self.toolkit.add(function, writes=True)
        return function

    def template(
        self, *, difficulty: int, held_out: bool = False
    ) -> Callable[[TaskGenerator], TaskGenerator]:
        """Register a task template; the function's name becomes the template's name."""

        def register(generate: TaskGenerator) -> TaskGenerator:
            name = generate.__name__
            self.templates.append(
                Template(name=name, generate=generate, difficulty=difficulty, held_out=held_out)
            )
            return generate

        return register

    def variables(self, data_seed: int) -> dict[str, str]:
        """Return the env_variables that belong to the data of this seed."""
        rng = Random(f"{self.name}/variables/{data_seed}")
        today = date(2026, 1, 1) + timedelta(days=rng.randrange(365))
        return {"CURRENT_DATE": today.isoformat(), "LOGGED_IN_USER": rng.choice(PEOPLE)}

    def image(self, data_seed: int) -> bytes:
        """Return the seeded database as bytes, from a cache of the latest seeds."""
        if data_seed not in self._images:
            if len(self._images) >= _MAX_CACHED_IMAGES:
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
        """Return the tables without rows; cached, as parsing a schema costs as much as filling it."""
        if self._empty is None:
            db = Database()
            # Small pages: most tables have few rows, and every episode copies all pages.
            db.write("pragma page_size = 1024")
            db.connection.executescript(self._schema)
            self._empty = db.image()
            db.close()
        return self._empty

    def open(self, data_seed: int, variables: Mapping[str, Any]) -> App:
        """Open a fresh copy of the seeded data, which the caller closes.

        Variables that are missing take the values that belong to the data.
        """
        if not variables.keys() >= _VARIABLES:
            variables = {**self.variables(data_seed), **variables}
        return _app(Database(self.image(data_seed)), variables, data_seed)


_VARIABLES = {"CURRENT_DATE", "LOGGED_IN_USER"}
_MAX_CACHED_IMAGES = 1000
"""An image takes 7 to 37 kB; building one takes 1 to 2 ms."""


def call(tool: str, /, **arguments: Any) -> RecordedCall:
    return RecordedCall(name=tool, arguments=arguments)


def _app(db: Database, variables: Mapping[str, Any], data_seed: int) -> App:
    return App(
        db=db,
        current_date=variables["CURRENT_DATE"],
        user=variables["LOGGED_IN_USER"],
        family=data_seed % FAMILIES,
    )
