from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyfleet.errors import CheckpointError, ConfigError, TaskError
from skyfleet.tasks.sampling import TaskSampler
from skyfleet.tasks.task import Task


def tasks(**n_by_env: int) -> list[Task]:
    return [
        Task(key=f"{env}{i}", env_key=env, prompt="p")
        for env, n in n_by_env.items()
        for i in range(n)
    ]


def keys(batch: list[Task]) -> list[str]:
    return [task.key for task in batch]


@given(n=st.integers(1, 30), batch_size=st.integers(1, 30), seed=st.integers(0, 3))
def test_every_task_is_drawn_exactly_once_per_epoch(n: int, batch_size: int, seed: int) -> None:
    batch_size = min(batch_size, n)
    sampler = TaskSampler(tasks(a=n), batch_size=batch_size, seed=seed)
    batches = [keys(sampler.draw()) for _ in range(4 * n)]
    assert all(len(set(batch)) == batch_size for batch in batches)
    stream = [key for batch in batches for key in batch]
    for start in range(0, len(stream), n):
        assert len(set(stream[start : start + n])) == n


def test_the_epoch_ends_when_its_last_task_is_drawn() -> None:
    sampler = TaskSampler(tasks(a=5), batch_size=2, seed=0)
    epochs = []
    for _ in range(5):
        sampler.draw()
        epochs.append(sampler.epoch)
    assert epochs == [0, 0, 1, 1, 2]  # 2, 4, 6, 8, 10 tasks drawn


def test_epochs_and_seeds_shuffle_differently() -> None:
    sampler = TaskSampler(tasks(a=20), batch_size=20, seed=0)
    first, second = keys(sampler.draw()), keys(sampler.draw())
    other = keys(TaskSampler(tasks(a=20), batch_size=20, seed=1).draw())
    assert first != second
    assert first != other
    assert sorted(first) == sorted(second) == sorted(other)


def test_draws_do_not_depend_on_the_order_of_the_file() -> None:
    rows = tasks(a=9, b=4)
    one = TaskSampler(rows, batch_size=4, seed=7, min_per_env=1)
    two = TaskSampler(rows[::-1], batch_size=4, seed=7, min_per_env=1)
    assert [keys(one.draw()) for _ in range(9)] == [keys(two.draw()) for _ in range(9)]


@given(
    big=st.integers(2, 30),
    small=st.integers(2, 4),
    batch_size=st.integers(4, 8),
    least=st.integers(0, 2),
    n_before=st.integers(0, 40),
)
def test_a_resumed_sampler_draws_the_same_batches(
    big: int, small: int, batch_size: int, least: int, n_before: int
) -> None:
    rows = tasks(big=big, small=small)

    def fresh() -> TaskSampler:
        size = min(batch_size, len(rows))
        return TaskSampler(rows, batch_size=size, seed=3, min_per_env=least)

    sampler, resumed = fresh(), fresh()
    for _ in range(n_before):
        sampler.draw()
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert resumed.epoch == sampler.epoch
    assert resumed.state_dict() == sampler.state_dict()
    for _ in range(20):
        assert keys(resumed.draw()) == keys(sampler.draw())


@given(big=st.integers(2, 40), small=st.integers(2, 4), batch_size=st.integers(4, 9))
def test_every_batch_has_min_per_env_tasks_of_each_env(
    big: int, small: int, batch_size: int
) -> None:
    rows = tasks(big=big, small=small)
    batch_size = min(batch_size, len(rows))
    sampler = TaskSampler(rows, batch_size=batch_size, seed=0, min_per_env=2)
    for _ in range(30):
        batch = sampler.draw()
        assert len(set(keys(batch))) == batch_size
        assert min(Counter(task.env_key for task in batch)[env] for env in ("big", "small")) >= 2


def test_a_tiny_env_does_not_shorten_the_epoch() -> None:
    sampler = TaskSampler(tasks(big=30, tiny=2), batch_size=2, seed=0, min_per_env=1)
    drawn: Counter[str] = Counter()
    while sampler.epoch == 0:
        drawn.update(keys(sampler.draw()))
    # One of each in every batch: 30 batches for the big ones, 15 rounds of the two tiny ones.
    assert all(drawn[f"big{i}"] == 1 for i in range(30))
    assert drawn["tiny0"] == drawn["tiny1"] == 15


def test_the_state_is_small() -> None:
    sampler = TaskSampler(tasks(a=5000), batch_size=16, seed=0)
    for _ in range(400):
        sampler.draw()
    assert len(json.dumps(sampler.state_dict())) < 300


def test_a_state_saved_with_other_tasks_is_rejected() -> None:
    state = TaskSampler(tasks(a=5), batch_size=2, seed=0).state_dict()
    with pytest.raises(CheckpointError, match=r"data\.train_data \(tasks=.* new folder"):
        TaskSampler(tasks(a=6), batch_size=2, seed=0).load_state_dict(state)
    with pytest.raises(CheckpointError, match="train_batch_size=2, now it is 3"):
        TaskSampler(tasks(a=5), batch_size=3, seed=0).load_state_dict(state)


def test_a_batch_larger_than_the_task_set_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size=6 .* there are 5"):
        TaskSampler(tasks(a=5), batch_size=6, seed=0)


def test_min_per_env_above_the_batch_size_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"min_samples_per_env=2 x 3 envs = 6 .*train_batch_size=5"
    ):
        TaskSampler(tasks(a=5, b=5, c=5), batch_size=5, seed=0, min_per_env=2)


def test_an_env_with_fewer_than_min_per_env_tasks_is_rejected() -> None:
    with pytest.raises(ConfigError, match="env 'b' has only 1 different tasks"):
        TaskSampler(tasks(a=5, b=1), batch_size=5, seed=0, min_per_env=2)


def test_a_duplicate_key_is_rejected() -> None:
    with pytest.raises(TaskError, match="key='a0'"):
        TaskSampler([*tasks(a=2), *tasks(a=1)], batch_size=2, seed=0)
