"""Mixture weights decide how many prompts of each environment a batch has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.tasks.curriculum import CurriculumSampler
from skyfleet.tasks.mixture import Mixture, MixtureSampler
from skyfleet.tasks.task import Task


def tasks(**n_by_env: int) -> list[Task]:
    return [
        Task(key=f"{env}{i}", env_key=env, prompt="p")
        for env, n in n_by_env.items()
        for i in range(n)
    ]


ROWS = tasks(telecom=40, healthcare=20, doordash=10)


def count_envs(batch: list[Task]) -> Counter[str]:
    return Counter(task.env_key for task in batch)


def mixture(weights: Mapping[str, float], *, batch_size: int, min_per_env: int = 1) -> Mixture:
    return Mixture(ROWS, weights, batch_size=batch_size, min_per_env=min_per_env)


def test_a_batch_is_split_by_weight_and_not_by_the_number_of_tasks() -> None:
    counts = mixture({"telecom": 2, "healthcare": 1, "doordash": 1}, batch_size=8).next_counts()
    assert counts == {"telecom": 4, "healthcare": 2, "doordash": 2}


def test_an_environment_without_a_weight_has_weight_1() -> None:
    assert mixture({"telecom": 2}, batch_size=8).next_counts() == {
        "telecom": 4, "healthcare": 2, "doordash": 2,
    }  # fmt: skip


def test_fractions_are_carried_to_later_batches() -> None:
    """Shares of 5/3 each: three batches of 5 give every environment exactly 5."""
    split = mixture({}, batch_size=5)
    batches = [split.next_counts() for _ in range(3)]
    assert {env: sum(b[env] for b in batches) for env in batches[0]} == {
        "telecom": 5, "healthcare": 5, "doordash": 5,
    }  # fmt: skip
    assert {count for batch in batches for count in batch.values()} == {1, 2}


def test_every_environment_is_in_every_batch_however_small_its_weight() -> None:
    split = mixture({"doordash": 0.001}, batch_size=5)
    assert [split.next_counts()["doordash"] for _ in range(20)] == [1] * 20


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    batch_size=st.integers(3, 10),
    n_batches=st.integers(1, 30),
)
def test_counts_fill_the_batch_and_stay_within_one_prompt_of_the_share(
    weights: list[float], batch_size: int, n_batches: int
) -> None:
    rows = tasks(a=10, b=10, c=10)
    split = Mixture(
        rows, dict(zip("abc", weights, strict=True)), batch_size=batch_size, min_per_env=1
    )
    for _ in range(n_batches):
        counts = split.next_counts()
        assert sum(counts.values()) == batch_size
        assert all(abs(counts[env] - share) < 1 for env, share in split.shares.items())
        assert min(counts.values()) >= 1


def test_a_weight_for_an_environment_without_tasks_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.env_weights\.retail=2, but .*choose from \['door"
    ):
        mixture({"retail": 2}, batch_size=4)


def test_a_weight_that_needs_more_tasks_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'doordash' up to 23 of .*only 10 different tasks"):
        mixture({"doordash": 20}, batch_size=25)


def sampler(**settings: object) -> MixtureSampler:
    given = {"batch_size": 8, "seed": 3, "weights": {"doordash": 2.0}, "min_per_env": 1}
    return MixtureSampler(ROWS, **(given | settings))  # type: ignore[arg-type]


def test_batches_have_the_shares_and_no_task_twice() -> None:
    drawn = sampler()
    for _ in range(60):
        batch = drawn.draw()
        assert count_envs(batch) == {"doordash": 4, "healthcare": 2, "telecom": 2}
        assert len({task.key for task in batch}) == 8


def test_a_stream_draws_every_task_once_per_pass() -> None:
    """Ten doordash tasks, four per batch: five batches are two passes."""
    drawn = sampler()
    keys = Counter(t.key for _ in range(5) for t in drawn.draw() if t.env_key == "doordash")
    assert set(keys.values()) == {2}
    assert len(keys) == 10


def test_a_restored_sampler_continues_where_the_saved_one_stopped() -> None:
    for n_before in range(12):
        one, other = sampler(), sampler()
        for _ in range(n_before):
            one.draw()
        other.load_state_dict(one.state_dict())
        assert [one.draw() for _ in range(6)] == [other.draw() for _ in range(6)]


def test_other_weights_are_refused_on_resume() -> None:
    state = sampler().state_dict()
    with pytest.raises(CheckpointError, match=r"data\.env_weights"):
        sampler(weights={"doordash": 3.0}).load_state_dict(state)


def test_a_curriculum_keeps_to_the_weights_and_resumes() -> None:
    def build() -> CurriculumSampler:
        return CurriculumSampler(
            ROWS, batch_size=7, seed=0, min_per_env=1, weights={"doordash": 2.0}
        )

    one, other = build(), build()
    for _ in range(3):
        batch = one.draw()
        assert count_envs(batch)["doordash"] in (3, 4)
        one.observe(batch[0].key, passed=1, failed=1)
    other.load_state_dict(one.state_dict())
    assert [one.draw() for _ in range(5)] == [other.draw() for _ in range(5)]
