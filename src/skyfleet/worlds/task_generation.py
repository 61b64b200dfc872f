"""Task generation: one template on one seeded database, with the verifier that its own solution implies."""

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
import re
from collections.abc import Iterable
from skyfleet.envs.verifiers.difference import Difference
from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds.world import Draft, Template, World


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
