"""Draw a task: one template on one seeded database, with the verifier its own solution implies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import closing
from random import Random

from skyfleet.envs.tools import ToolError
from skyfleet.envs.turns import SUBMIT_NAME
from skyfleet.envs.verifiers.difference import Change, Difference
from skyfleet.envs.verifiers.writing import write_verifier
from skyfleet.tasks.task import Task
from skyfleet.worlds.database import Database
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.vocabulary import FAMILIES
from skyfleet.worlds.world import Draft, Template, World, call

DATA_SEEDS = 1_000_000
"""So many databases a world has: nearly every task has its own, so answers must be looked up."""


def draw_task(
    world: World,
    template: Template,
    rng: Random,
    wanted: Callable[[str, str], bool],
    *,
    family: int,
) -> Task | None:
    """A task whose key and wish are `wanted`, or None: this draw was none."""
    data_seed = rng.randrange(0, DATA_SEEDS, FAMILIES) + family
    variables = world.variables(data_seed)
    app = world.open(data_seed, variables)
    with closing(app.db):
        draft = template.draft(app, rng)
        if draft is None:
            return None
        prompt, solution = rng.choice(draft.prompts), list(draft.calls)
        if draft.answer is not None:
            prompt += f" Give {SUBMIT_NAME} only the {draft.answer_kind}."
            solution.append(call(SUBMIT_NAME, answer=draft.answer))
        wish = _digest([prompt, [one.model_dump() for one in solution]])
        key = f"{world.name}-{template.name}-{_digest([data_seed, wish])[:8]}"
        if not wanted(key, wish):
            return None
        changes = _play(world, app, draft, data_seed)
    if not changes and draft.answer is None:
        return None  # two errands that undo each other: who does nothing would pass
    return Task(
        key=key,
        env_key=world.name,
        prompt=prompt,
        env_variables=variables,
        data_key=f"seed-{data_seed}",
        verifier_code=write_verifier(changes, draft.answer),
        difficulty=template.difficulty,
        solution=tuple(solution),
        metadata={"template": template.name, "expected_errors": draft.expected_errors},
    )


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _play(world: World, app: App, draft: Draft, data_seed: int) -> tuple[Change, ...]:
    """Make the reference calls; what they change is what the verifier expects."""
    errors = []
    for one in draft.calls:
        try:
            world.toolkit.call(app, one.name, one.arguments)
        except ToolError as error:
            errors.append(str(error))
    if len(errors) != draft.expected_errors:
        raise ValueError(
            f"{world.name}: {draft.prompts[0]!r} met {errors}, not {draft.expected_errors} errors; "
            "mend the template"
        )
    with closing(Database(world.image(data_seed))) as seed:
        return Difference(seed.connection, app.db.connection).changes
