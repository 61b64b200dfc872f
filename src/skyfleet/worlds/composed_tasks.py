"""Errands: two wishes in one task, the second drafted where the first left off."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import closing
from random import Random

from skyfleet.envs.tools import ToolError
from skyfleet.envs.verifiers.difference import Difference
from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds.database import Database
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import Draft, Template, World

MOST_CALLS = 8


def two_errands(world: World) -> Template | None:
    """Made of the templates that are trained on; None where a world has fewer than two of them."""
    parts = [one for one in world.templates if not one.held_out]
    if len(parts) < 2:
        return None

    def draft(app: App, rng: Random) -> Draft | None:
        first, second = rng.sample(parts, 2)
        errand = first.draft(app, rng)
        if errand is None or errand.answer is not None:
            return None
        with closing(Database(app.db.image())) as before, app.db.undone():
            errors = _errors_of(world, app, errand.calls)
            done = Difference(before.connection, app.db.connection).changes
            following = second.draft(app, rng)
            if following is None or len(errand.calls) + len(following.calls) >= MOST_CALLS:
                return None
            if any(_says(prompt, following.answer) for prompt in errand.prompts):
                return None
            errors += _errors_of(world, app, following.calls)
            left = Difference(before.connection, app.db.connection).changes
        expected_errors = errand.expected_errors + following.expected_errors
        # Where the second undoes or overwrites the first, nobody could tell that it was done.
        if errors != expected_errors or not all(change in left for change in done):
            return None
        return _joined(errand, following)

    return Template(name="two_errands", draft=draft, difficulty=3, held_out=False)


def _says(prompt: str, answer: str | None) -> bool:
    """By chance one wish may hold the answer to the other."""
    return answer is not None and re.search(rf"\b{re.escape(answer)}\b", prompt) is not None


def _joined(errand: Draft, following: Draft) -> Draft:
    return Draft(
        prompts=[f"{one} Then: {other}" for one in errand.prompts for other in following.prompts],
        calls=[*errand.calls, *following.calls],
        answer=following.answer,
        answer_kind=following.answer_kind,
        expected_errors=errand.expected_errors + following.expected_errors,
    )


def _errors_of(world: World, app: App, calls: Iterable[RecordedCall]) -> int:
    errors = 0
    for one in calls:
        try:
            world.toolkit.call(app, one.name, one.arguments)
        except ToolError:
            errors += 1
    return errors
