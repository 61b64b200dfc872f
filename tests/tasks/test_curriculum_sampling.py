"""With a curriculum, batches lean towards what can be learned, and a resumed run draws the same."""

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


def test_every_batch_has_some_of_each_env_and_no_task_twice() -> None:
    drawing = sampler(batch_size=8, min_per_env=2)
    for _ in range(50):
        batch = drawing.draw()
        assert len({task.key for task in batch}) == 8
        counts = Counter(task.env_key for task in batch)
        assert min(counts[env] for env in ("github", "booking", "outlook")) >= 2


def test_what_is_always_or_never_solved_is_drawn_less() -> None:
    drawing = sampler(min_per_env=0)
    for i in range(20):
        for _ in range(5):
            half = i < 5
            drawing.observe(f"github-{i}", passed=4 if half else 8, failed=4 if half else 0)
    counts = Counter(task.key for _ in range(500) for task in drawing.draw())
    mixed = sum(counts[f"github-{i}"] for i in range(5)) / 5
    solved = sum(counts[f"github-{i}"] for i in range(5, 20)) / 15
    # Weights 1 and 0.1 + 0.9 * 4p(1-p) with p = 27.89 / 28.89, so 0.22.
    assert 3 < mixed / solved < 6


def test_a_saved_place_goes_on_with_the_same_draws() -> None:
    drawing = sampler()
    for _ in range(3):
        for task in drawing.draw():
            drawing.observe(task.key, passed=1, failed=3)
    other = sampler()
    other.load_state_dict(drawing.state_dict())
    assert [other.draw() for _ in range(5)] == [drawing.draw() for _ in range(5)]
    assert other.epoch == 8 * 4 // 32


def test_another_run_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the sampler was saved with seed=3 and now has 4"):
        sampler(seed=4).load_state_dict(sampler().state_dict())
    with pytest.raises(ConfigError, match="min_samples_per_env=2 x 3 envs = 6 is more"):
        sampler(min_per_env=2)
