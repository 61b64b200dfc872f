"""However samples are split into micro-batches, every action token is in exactly one of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.samples import random_groups, sample

from skyfleet.algorithms.sample import Sample
from skyfleet.learner.batching import mini_batches, pack, plan

CPU = torch.device("cpu")


def numbered(samples: list[Sample]) -> list[Sample]:
    """Each action token has a distinct logprob, which identifies it."""
    numbers = count(1)
    return [
        replace(s, logprobs=tuple(float(-next(numbers)) if c else 0.0 for c in s.loss_mask))
        for s in samples
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 400))
def test_every_action_token_is_in_exactly_one_micro_batch(
    n_groups: int, size: int, max_tokens: int
) -> None:
    samples = numbered(random_groups(n_groups, size=size))
    batches = pack(samples, [1.0] * len(samples), max_tokens=max_tokens, device=CPU)
    got = sorted(
        (logprob, token, advantage)
        for batch in batches
        for logprob, token, advantage in zip(
            batch.behaviour_logprobs_N.tolist(),
            batch.action_N.tolist(),
            batch.advantages_N.tolist(),
            strict=True,
        )
    )
    expected = sorted(
        (logprob, token, pytest.approx(advantage))
        for s in samples
        for logprob, token, advantage, is_action in zip(
            s.logprobs, s.token_ids, s.advantages, s.loss_mask, strict=True
        )
        if is_action
    )
    assert got == expected


def test_an_action_token_is_predicted_from_the_token_before_it() -> None:
    samples = [sample([5, 6, 7, 8], [False, False, True, True]), sample([5, 9], [False, True])]
    (batch,) = pack(samples, [1.0, 1.0], max_tokens=100, device=CPU)
    before = batch.attention.token_ids_T[batch.before_N]
    pairs = zip(before.tolist(), batch.action_N.tolist(), strict=True)
    assert sorted(pairs) == [(5, 9), (6, 7), (7, 8)]


def test_weights_are_given_per_sample_and_kl_is_a_mean_over_sequences() -> None:
    samples = [sample([5, 6, 7, 8], [False, False, True, True]), sample([5, 9], [False, True])]
    (batch,) = pack(samples, [0.3, 0.7], max_tokens=100, device=CPU)
    assert batch.weights_N.tolist() == pytest.approx([0.3, 0.3, 0.7])
    assert batch.kl_weights_N.tolist() == pytest.approx([0.25, 0.25, 0.5])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 200))
def test_no_micro_batch_is_over_budget_unless_one_sample_is(n_groups: int, max_tokens: int) -> None:
    samples = random_groups(n_groups)
    members = plan(samples, max_tokens=max_tokens)
    assert sorted(i for batch in members for i in batch) == list(range(len(samples)))
    for batch in members:
        padded = len(batch) * max(len(samples[i].token_ids) for i in batch)
        assert padded <= max_tokens or len(batch) == 1


def test_attempts_at_one_task_stay_together_when_they_fit() -> None:
    samples = random_groups(3)
    shuffled = samples[::2] + samples[1::2]
    for batch in plan(shuffled, max_tokens=4 * max(len(s.token_ids) for s in samples)):
        keys = [shuffled[i].task_key for i in batch]
        assert keys == sorted(keys, key=keys.index)


@pytest.mark.parametrize(
    ("n", "attempts", "sizes"),
    [
        (33, 1, [11, 11, 11]),
        (17, 1, [9, 8]),
        (32, 1, [16, 16]),
        (16, 1, [16]),
        (0, 1, []),
        (34, 34, [12, 12, 10]),
        (24, 8, [16, 8]),  # a cut in two halves would read a task's beginning twice
    ],
)
@pytest.mark.parametrize("length", [3, 10])
def test_micro_batches_have_nearly_equal_size(
    n: int, attempts: int, sizes: list[int], length: int
) -> None:
    samples = [
        sample([5] * length, [False] + [True] * (length - 1), task_key=f"{i // attempts:02}")
        for i in range(n)
    ]
    batches = plan(samples, max_tokens=16 * length + 2)
    assert [len(batch) for batch in batches] == sizes
    assert [i for batch in batches for i in batch] == list(range(n))


def test_on_a_cpu_each_micro_batch_is_filled_before_the_next() -> None:
    samples = [sample([5, 6], [False, True], task_key=f"{i:02}") for i in range(33)]
    batches = pack(samples, [1.0] * 33, max_tokens=32, device=CPU)
    assert [len(batch.members) for batch in batches] == [16, 16, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 400))
def test_an_even_split_needs_no_more_passes_and_splits_no_more_tasks(
    n_groups: int, max_tokens: int
) -> None:
    samples = random_groups(n_groups)
    even, full = (plan(samples, max_tokens=max_tokens, evenly=e) for e in (True, False))
    assert len(even) == len(full)
    pieces = [
        sum(len({samples[i].task_key for i in batch}) for batch in batches)
        for batches in (even, full)
    ]
    assert pieces[0] <= pieces[1]
    heaviest = [
        max(len(batch) * max(len(samples[i].token_ids) for i in batch) for batch in batches)
        for batches in (even, full)
    ]
    assert heaviest[0] <= heaviest[1]


def test_mini_batches_keep_a_task_together() -> None:
    samples = random_groups(5, size=3)
    cut = mini_batches(samples, 2)
    assert [[s.task_key for s in batch] for batch in cut] == [
        ["task-0"] * 3 + ["task-1"] * 3,
        ["task-2"] * 3 + ["task-3"] * 3,
        ["task-4"] * 3,
    ]


@pytest.mark.parametrize(
    ("n_tasks", "prompts", "sizes"),
    [(32, 16, [16, 16]), (33, 16, [11, 11, 11]), (17, 16, [9, 8]), (3, 16, [3]), (0, 16, [])],
)
def test_mini_batches_of_a_filtered_batch_have_nearly_equal_size(
    n_tasks: int, prompts: int, sizes: list[int]
) -> None:
    samples = random_groups(n_tasks, size=1)
    cut = mini_batches(samples, prompts)
    assert [len(batch) for batch in cut] == sizes
    assert [s for batch in cut for s in batch] == samples
