"""Errands: two wishes in one task, the second drafted where the first left off."""

from __future__ import annotations

from random import Random

from skyfleet.envs.worlds.toolkit import App, ToolError
from skyfleet.envs.worlds.world import Draft, Template, World

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
        with app.db.undone():
            for one in errand.calls:
                try:
                    world.toolkit.call(app, one.name, one.arguments)
                except ToolError:
                    # Those that fail on purpose are counted when the whole task is played.
                    continue
            following = second.draft(app, rng)
        if following is None or len(errand.calls) + len(following.calls) >= MOST_CALLS:
            return None
        return Draft(
            prompts=[
                f"{one} Then: {other}" for one in errand.prompts for other in following.prompts
            ],
            calls=[*errand.calls, *following.calls],
            answer=following.answer,
            answer_kind=following.answer_kind,
            expected_errors=errand.expected_errors + following.expected_errors,
        )

    return Template(name="two_errands", draft=draft, difficulty=3, held_out=False)
