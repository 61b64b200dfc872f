"""No episode goes beyond its turns, its prompt or its words."""

from __future__ import annotations

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Played


def limits(played: Played) -> Finding | None:
    allowed = played.expected.limits
    for group in played.groups:
        for attempt in group.trajectories:
            if len(attempt.turns) > allowed.max_turns:
                return found(
                    "an episode has more turns than generator.max_turns",
                    task=attempt.task_key,
                    turns=len(attempt.turns),
                    max_turns=allowed.max_turns,
                )
    for speech in played.speeches:
        task = speech.trajectory.task_key
        for said in speech.heard:
            length = len(said.completion.token_ids)
            if length > said.max_generate_length:
                return found(
                    "the engine said more than it was asked for",
                    task=task,
                    tokens=length,
                    asked=said.max_generate_length,
                )
            if said.prompt_length > allowed.max_input_length:
                return found(
                    "a turn began with a prompt longer than generator.max_input_length",
                    task=task,
                    tokens=said.prompt_length,
                    max_input_length=allowed.max_input_length,
                )
    return None
