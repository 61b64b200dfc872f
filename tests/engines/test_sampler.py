"""Samples follow the truncated distribution, and their logprobs are of that distribution."""

from __future__ import annotations

from hashlib import blake2b
from math import inf, log

import numpy as np
import pytest
import torch

from skyfleet.engines.sampler import make_rng, sample_tokens
from skyfleet.engines.sampling_params import SamplingParams

PROBS = (0.15, 0.5, 0.1, 0.25)
HALVES = SamplingParams(temperature=0.5)


def sample_from_probs(sampling: SamplingParams, *uniforms: float) -> tuple[list[int], list[float]]:
    logits_NV = torch.tensor(PROBS).log().add(3.0).repeat(len(uniforms), 1)
    tokens_N, logprobs_N = sample_tokens(
        logits_NV, sampling, torch.tensor(uniforms, dtype=torch.float64)
    )
    return tokens_N.tolist(), logprobs_N.tolist()


def distribution(sampling: SamplingParams) -> dict[int, float]:
    """Token -> logprob, over a fine grid of uniform numbers."""
    tokens, logprobs = sample_from_probs(sampling, *[(i + 0.5) / 1000 for i in range(1000)])
    return dict(zip(tokens, logprobs, strict=True))


def test_a_uniform_number_selects_by_cumulative_probability() -> None:
    tokens, logprobs = sample_from_probs(
        SamplingParams(), 0.0, 0.149, 0.151, 0.649, 0.651, 0.751, 1 - 2**-53
    )
    assert tokens == [0, 0, 1, 1, 2, 3, 3]
    assert logprobs == pytest.approx([log(PROBS[token]) for token in tokens], abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(top_k=1), {1: 1.0}),
        (SamplingParams(top_k=2), {1: 2 / 3, 3: 1 / 3}),
        (SamplingParams(top_k=9), dict(enumerate(PROBS))),
        (SamplingParams(top_p=0.4), {1: 1.0}),
        (SamplingParams(top_p=0.7), {1: 2 / 3, 3: 1 / 3}),
        (SamplingParams(top_p=0.8), {1: 5 / 9, 3: 2.5 / 9, 0: 1.5 / 9}),
        (SamplingParams(min_p=0.4), {1: 2 / 3, 3: 1 / 3}),
        (SamplingParams(min_p=1.0), {1: 1.0}),
        # Squares: 0.0225, 0.25, 0.01, 0.0625, which sum to 0.345.
        (HALVES, {0: 0.0225 / 0.345, 1: 0.25 / 0.345, 2: 0.01 / 0.345, 3: 0.0625 / 0.345}),
        # Of the squares only 0.0625 is within a fifth of 0.25.
        (SamplingParams(temperature=0.5, min_p=0.2), {1: 0.8, 3: 0.2}),
        # Top-k leaves 2/3 and 1/3, and 2/3 is already top-p's share.
        (SamplingParams(top_k=2, top_p=0.6), {1: 1.0}),
        # The same where min-p leaves them: min-p comes before top-p.
        (SamplingParams(min_p=0.4, top_p=0.6), {1: 1.0}),
    ],
)
def test_logprobs_are_those_of_the_truncated_distribution(
    sampling: SamplingParams, expected: dict[int, float]
) -> None:
    assert distribution(sampling) == pytest.approx(
        {token: log(p) for token, p in expected.items()}, abs=1e-6
    )


def test_temperature_zero_takes_the_most_likely_token_with_logprob_zero() -> None:
    assert sample_from_probs(SamplingParams(temperature=0, top_p=0.5), 0.0, 0.99) == (
        [1, 1],
        [0.0, 0.0],
    )


def test_frequencies_match_the_probabilities() -> None:
    uniforms = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, _ = sample_from_probs(SamplingParams(), *uniforms.tolist())
    for token, p in enumerate(PROBS):
        # Four standard deviations of a count of 20,000.
        assert abs(tokens.count(token) / 20_000 - p) < 4 * (p * (1 - p) / 20_000) ** 0.5


def test_a_truncated_token_is_never_sampled_from_a_large_vocabulary() -> None:
    logits_NV = torch.randn(4, 150_000, generator=torch.Generator().manual_seed(0))
    uniforms = torch.tensor([0.0, 0.5, 1 - 1e-12, 1 - 2**-53], dtype=torch.float64)
    for sampling in (SamplingParams(), SamplingParams(top_k=40), SamplingParams(top_p=0.9)):
        _, logprobs_N = sample_tokens(logits_NV, sampling, uniforms)
        assert all(logprob > -inf for logprob in logprobs_N.tolist())


def test_seed_session_and_position_are_the_philox_key() -> None:
    key = int.from_bytes(blake2b(b"7|task/3|24", digest_size=16).digest())
    expected = np.random.Generator(np.random.Philox(key=key)).random(5)
    assert make_rng(7, "task/3", 24).random(5).tolist() == expected.tolist()
