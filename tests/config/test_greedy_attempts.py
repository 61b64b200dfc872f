"""Several greedy attempts at a task are one attempt; nobody is measured by them, or trained."""

from __future__ import annotations

import pytest

from skyfleet.config.loading import load_config
from skyfleet.config.rules import greedy_attempts, unsupported, untrainable

N = "generator.eval_n_samples_per_prompt=4"
SAMPLING = "generator.eval_sampling_params"


@pytest.mark.parametrize("greedy", ["temperature=0", "top_k=1"])
def test_greedy_attempts_load_and_are_named_with_the_way_out(greedy: str) -> None:
    words = [N, f"{SAMPLING}.temperature=1", f"{SAMPLING}.{greedy}"]
    (sentence,) = greedy_attempts(load_config("", words))
    assert sentence == (
        f"{N} with {SAMPLING}.{greedy} would play one attempt 4 times, and pass@4 would be pass@1; "
        f"set generator.eval_n_samples_per_prompt=1, or {SAMPLING}.temperature=1 without top_k"
    )


@pytest.mark.parametrize("words", [[], [N, f"{SAMPLING}.temperature=0.7"]])
def test_one_attempt_or_drawn_attempts_are_fine(words: list[str]) -> None:
    assert list(greedy_attempts(load_config("", words))) == []


@pytest.mark.parametrize("greedy", ["temperature=0", "top_k=1"])
def test_greedy_attempts_are_not_learnt_from(greedy: str) -> None:
    words = ["trainer.algorithm.temperature=1", f"generator.sampling_params.{greedy}"]
    assert untrainable(load_config("", words)) == [
        f"generator.n_samples_per_prompt=4 with generator.sampling_params.{greedy} would play one "
        "attempt 4 times and compare it with itself; set generator.sampling_params.temperature=1 "
        "without top_k"
    ]
    assert untrainable(load_config("", [*words, "generator.n_samples_per_prompt=1"])) == []
    assert unsupported(load_config("", words)) == []  # nobody plays groups to measure or to serve
