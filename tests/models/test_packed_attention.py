"""Packed sequences with shared beginnings are the same sequences run one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.small_models import logits_of, small_decoder

from skyfleet.models.decoder import Decoder
from skyfleet.models.packed import PackedAttention

PROMPT = (5, 9, 2, 7, 7, 1)
GROUP = [
    (*PROMPT, 3, 4, 4, 8),
    (*PROMPT, 3, 4, 6),
    (*PROMPT, 3),
    (11, 12),
    (*PROMPT, 3, 4, 6),  # said twice
    PROMPT,  # a beginning of others
    (*PROMPT, 60, 3, 4, 4, 8, 1, 2),
]


def weighted_sum(decoder: Decoder, logits_BTV: Sequence[torch.Tensor]) -> torch.Tensor:
    """A different weight on every logit, so that no gradient can hide."""
    noise = torch.Generator().manual_seed(3)
    return torch.stack(
        [(logits * torch.randn(logits.shape, generator=noise)).sum() for logits in logits_BTV]
    ).sum()


def test_a_shared_beginning_is_one_run_of_rows() -> None:
    attention = PackedAttention([(1, 2, 3), (1, 2, 4, 5)], torch.device("cpu"))
    assert attention.token_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert attention.positions_T.tolist() == [0, 1, 2, 2, 3]
    assert attention.rows_BL[0, :3].tolist() == [0, 1, 2]
    assert attention.rows_BL[1].tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("sequences", [GROUP, GROUP[:1], [(1,), (1,)]])
def test_logits_and_gradients_are_those_of_the_sequences_one_by_one(
    sequences: list[tuple[int, ...]],
) -> None:
    decoder = small_decoder()
    parameters = list(decoder.module.parameters())
    alone = [logits_of(decoder, sequence) for sequence in sequences]
    expected = torch.autograd.grad(weighted_sum(decoder, alone), parameters)

    attend = PackedAttention(sequences, torch.device("cpu"))
    logits_TV = decoder.logits(decoder.hidden(attend.token_ids_T, attend.positions_T, attend))
    packed = [logits_TV[attend.rows_BL[i, : len(s)]] for i, s in enumerate(sequences)]
    got = torch.autograd.grad(weighted_sum(decoder, packed), parameters)

    for one, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8))
def test_every_sequence_is_found_whole_and_every_beginning_once(
    sequences: list[list[int]],
) -> None:
    attention = PackedAttention([tuple(s) for s in sequences], torch.device("cpu"))
    for row, sequence in zip(attention.rows_BL, sequences, strict=True):
        places = row[: len(sequence)]
        assert attention.token_ids_T[places].tolist() == sequence
        assert attention.positions_T[places].tolist() == list(range(len(sequence)))
    beginnings = {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}
    assert len(attention.token_ids_T) == len(beginnings)
