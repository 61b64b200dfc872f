"""Task generation: one template on one seeded database, with the verifier that its solution implies.

`compose_two` makes a template of two others: the second instruction is generated on the state that
the first one leaves.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from contextlib import closing
from random import Random

from skyfleet.envs.tool_turns import RESPOND_NAME, SUBMIT_NAME
from skyfleet.envs.tools import ToolError
from skyfleet.envs.verifiers.difference import Change, Difference
from skyfleet.envs.verifiers.write_verifier import write_verifier
from skyfleet.tasks.task import RecordedCall, Task
from skyfleet.worlds.database import Database
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.vocabulary import FAMILIES
from skyfleet.worlds.world import TaskDraft, Template, World, call

DATA_SEEDS = 1_000_000
"""Number of databases per world: nearly every task has its own, so answers must be looked up."""

MAX_CALLS = 8
"""A composed task needs fewer reference calls than this."""


def generate_task(
    world: World,
    template: Template,
    rng: Random,
    is_wanted: Callable[[str, str], bool],
    *,
    family: int,
) -> Task | None:
    """Generate a task; None if the draw fits no task or `is_wanted(key, content_hash)` is false."""
    data_seed = rng.randrange(0, DATA_SEEDS, FAMILIES) + family
    variables = world.variables(data_seed)
    app = world.open(data_seed, variables)
    with closing(app.db):
        draft = template.generate(app, rng)
        if draft is None:
            return None
        prompt, solution = rng.choice(draft.prompts), list(draft.calls)
        if draft.answer is not None:
            prompt += f" Give {SUBMIT_NAME} only the {draft.answer_kind}."
            solution.append(call(SUBMIT_NAME, answer=draft.answer))
        content_hash = _digest([prompt, [one.model_dump() for one in solution]])
        key = f"{world.name}-{template.name}-{_digest([data_seed, content_hash])[:8]}"
        if not is_wanted(key, content_hash):
            return None
        changes = _run_solution(world, app, draft, data_seed)
    if not changes and draft.answer is None and not draft.replies:
        return None  # The two parts of a composed task undo each other: doing nothing would pass.
    return Task(
        key=key,
        env_key=world.name,
        prompt=prompt,
        env_variables=variables,
        data_key=f"seed-{data_seed}",
        verifier_code=write_verifier(changes, draft.answer, replies=draft.replies),
        difficulty=template.difficulty,
        solution=tuple(solution),
        metadata={
            "template": template.name,
            "expected_errors": draft.expected_errors,
            **draft.columns,
        },
    )


def compose_two(world: World) -> Template | None:
    """Return a template that composes two training templates; None if the world has fewer or
    does not compose."""
    parts = [one for one in world.templates if not one.held_out]
    if len(parts) < 2 or not world.composes:
        return None

    def generate(app: App, rng: Random) -> TaskDraft | None:
        first_template, second_template = rng.sample(parts, 2)
        first = first_template.generate(app, rng)
        if first is None or first.answer is not None:
            return None
        with closing(Database(app.db.image())) as before, app.db.rollback_at_end():
            errors = _count_errors(world, app, first.calls)
            first_changes = Difference(before.connection, app.db.connection).changes
            second = second_template.generate(app, rng)
            if second is None or len(first.calls) + len(second.calls) >= MAX_CALLS:
                return None
            if any(_contains_answer(prompt, second.answer) for prompt in first.prompts):
                return None
            errors += _count_errors(world, app, second.calls)
            all_changes = Difference(before.connection, app.db.connection).changes
        expected_errors = first.expected_errors + second.expected_errors
        # If the second part undoes or overwrites the first, the final state cannot show that the
        # first was done.
        if errors != expected_errors or not all(one in all_changes for one in first_changes):
            return None
        return _compose(first, second)

    # The name is part of task keys and therefore of the train/eval split: it cannot change.
    return Template(name="two_errands", generate=generate, difficulty=3, held_out=False)


def _contains_answer(prompt: str, answer: str | None) -> bool:
    """One instruction may by chance contain the answer to the other."""
    return answer is not None and re.search(rf"\b{re.escape(answer)}\b", prompt) is not None


def _compose(first: TaskDraft, second: TaskDraft) -> TaskDraft:
    return TaskDraft(
        prompts=[f"{one} Then: {other}" for one in first.prompts for other in second.prompts],
        calls=[*first.calls, *second.calls],
        answer=second.answer,
        answer_kind=second.answer_kind,
        expected_errors=first.expected_errors + second.expected_errors,
    )


def _count_errors(world: World, app: App, calls: Iterable[RecordedCall]) -> int:
    errors = 0
    for one in calls:
        try:
            world.toolkit.call(app, one.name, one.arguments)
        except ToolError:
            errors += 1
    return errors


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _run_solution(world: World, app: App, draft: TaskDraft, data_seed: int) -> tuple[Change, ...]:
    """Make the reference calls and return the changes, which the verifier expects."""
    errors = []
    for one in draft.calls:
        if one.name == RESPOND_NAME:
            continue
        try:
            world.toolkit.call(app, one.name, one.arguments)
        except ToolError as error:
            errors.append(str(error))
    if len(errors) != draft.expected_errors:
        raise ValueError(
            f"{world.name}: the reference calls of {draft.prompts[0]!r} raised {errors}, expected "
            f"{draft.expected_errors} errors; correct the template"
        )
    with closing(Database(world.image(data_seed))) as seed:
        return Difference(seed.connection, app.db.connection).changes
