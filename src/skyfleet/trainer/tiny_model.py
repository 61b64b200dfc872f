"""Scratch: a tokenizer and a tiny policy made for the run's own tasks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from skyfleet.chat.renderers import make_renderer
from skyfleet.envs.env import EnvFactory
from skyfleet.models.loading import Loaded
from skyfleet.models.tiny import DIMENSIONS, build_tiny, train_tokenizer
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.scripted_agents import reference_policy
from skyfleet.tasks.task import Task

_ENOUGH = 500
"""Tasks, drawn from all, that show every word there is."""


async def make_policy(
    tasks: Sequence[Task],
    open_env: EnvFactory,
    limits: Limits,
    overrides: Mapping[str, Any],
    *,
    seed: int,
) -> Loaded:
    """The vocabulary is learned from how the tasks' solutions read; the weights are random."""
    by_bytes = train_tokenizer([], vocab_size=0)
    renderer = make_renderer(by_bytes)
    # A byte is a token here, so lengths mean nothing yet.
    unlimited = replace(limits, max_input_length=sys.maxsize)
    # Not `demonstrate`: a solution that does not pass shows words all the same.
    groups = await collect(
        Random(seed).sample(list(tasks), min(len(tasks), _ENOUGH)),
        open_env,
        reference_policy(renderer),
        unlimited,
        n_samples=1,
        max_concurrent=64,
    )
    attempts = [attempt for group in groups for attempt in group.trajectories]
    texts = [renderer.text(t.token_ids) for attempt in attempts for t in attempt.transcripts]
    vocab_size = int(overrides.get("vocab_size", DIMENSIONS["vocab_size"]))
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    return Loaded(module=build_tiny(tokenizer, overrides, seed=seed), tokenizer=tokenizer)
