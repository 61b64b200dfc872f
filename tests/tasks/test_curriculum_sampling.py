"""The curriculum sampler prefers tasks with mixed outcomes, and a resumed run draws the same."""

from __future__ import annotations

from collections import Counter

import pytest

from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.tasks.curriculum import CurriculumSampler
from skyfleet.tasks.task import Task


def tasks(**n_by_env: int) -> list[Task]:
    return [
        Task(key=f"{env}-{i}", env_key=env, prompt="p")
        for env, n in n_by_env.items()
        for i in range(n)
    ]


def sampler(batch_size: int = 4, seed: int = 3, min_per_env: int = 1) -> CurriculumSampler:
    return CurriculumSampler(
        tasks(github=20, booking=10, outlook=2),
        batch_size=batch_size,
        seed=seed,
        min_per_env=min_per_env,
    )


def test_every_batch_has_min_per_env_tasks_and_no_duplicates() -> None:
    curriculum = sampler(batch_size=8, min_per_env=2)
    for _ in range(50):
        batch = curriculum.draw()
        assert len({task.key for task in batch}) == 8
        counts = Counter(task.env_key for task in batch)
        assert min(counts[env] for env in ("github", "booking", "outlook")) >= 2


def test_tasks_always_or_never_solved_are_drawn_less() -> None:
    curriculum = sampler(min_per_env=0)
    for i in range(20):
        for _ in range(5):
            half = i < 5
            curriculum.observe(f"github-{i}", passed=4 if half else 8, failed=4 if half else 0)
    counts = Counter(task.key for _ in range(500) for task in curriculum.draw())
    mixed = sum(counts[f"github-{i}"] for i in range(5)) / 5
    solved = sum(counts[f"github-{i}"] for i in range(5, 20)) / 15
    # Weights 1 and 0.1 + 0.9 * 4p(1-p) with p = 27.89 / 28.89, so 0.22.
    assert 3 < mixed / solved < 6


def test_a_resumed_curriculum_sampler_draws_the_same_batches() -> None:
    curriculum = sampler()
    for _ in range(3):
        for task in curriculum.draw():
            curriculum.observe(task.key, passed=1, failed=3)
    other = sampler()
    other.load_state_dict(curriculum.state_dict())
    assert [other.draw() for _ in range(5)] == [curriculum.draw() for _ in range(5)]
    assert other.epoch == 8 * 4 // 32


def test_the_state_of_another_run_is_rejected() -> None:
    with pytest.raises(CheckpointError, match=r"saved with trainer\.seed=3, now it is 4"):
        sampler(seed=4).load_state_dict(sampler().state_dict())
    with pytest.raises(ConfigError, match="min_samples_per_env=2 x 3 envs = 6 is more"):
        sampler(min_per_env=2)
