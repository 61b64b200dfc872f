"""A task's reference solution passes through the same loop as any policy."""

from __future__ import annotations

import pytest

from skyfleet.chat.renderers import make_renderer
from skyfleet.models.tiny import train_tokenizer
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy, reference_policy
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks, open_world

LIMITS = Limits(max_turns=12, max_input_length=100_000, trajectory_timeout_seconds=0)


@pytest.mark.parametrize("world", WORLD_NAMES)
async def test_the_solution_passes_in_words_and_in_tokens_and_doing_nothing_does_not(
    world: str,
) -> None:
    tasks = generate_world_tasks(world, split="all", count=6)
    renderer = make_renderer(train_tokenizer([], vocab_size=0))
    for policy, expected in (
        (oracle_policy, True),
        (reference_policy(renderer), True),
        (null_policy, False),
    ):
        groups = await collect(tasks, open_world, policy, LIMITS, n_samples=1, max_concurrent=6)
        assert [g.trajectories[0].success for g in groups] == [expected] * 6


async def test_the_solution_in_tokens_is_what_the_renderer_writes() -> None:
    (task,) = generate_world_tasks("github", split="train", count=1)
    renderer = make_renderer(train_tokenizer([], vocab_size=0))
    (group,) = await collect(
        [task], open_world, reference_policy(renderer), LIMITS, n_samples=1, max_concurrent=1
    )
    (trajectory,) = group.trajectories
    (transcript,) = trajectory.transcripts
    pairs = zip(transcript.token_ids, transcript.loss_mask, strict=True)
    written = [
        token for turn in trajectory.turns for token in renderer.render_completion(turn.action)
    ]
    assert [token for token, chosen in pairs if chosen] == written
