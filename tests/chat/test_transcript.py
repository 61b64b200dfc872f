"""Transcript: append-only from outside, and cheap to extend."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any, cast

import pytest

from skyfleet.chat.transcript import Completion, Transcript

COMPLETION = Completion(token_ids=(3, 4), logprobs=(-0.5, -1.5), finish="stop", policy_version=7)


def build_transcript() -> Transcript:
    transcript = Transcript()
    transcript.append_prompt([1, 2])
    transcript.append_completion(COMPLETION)
    transcript.append_prompt([5])
    return transcript


def test_prompts_are_masked_and_completions_keep_their_logprobs() -> None:
    transcript = build_transcript()
    assert transcript.token_ids == [1, 2, 3, 4, 5]
    assert transcript.loss_mask == [False, False, True, True, False]
    assert transcript.logprobs == [0.0, 0.0, -0.5, -1.5, 0.0]
    assert transcript.policy_versions == [7]
    assert len(transcript) == 5


@pytest.mark.parametrize("column", ["token_ids", "loss_mask", "logprobs", "policy_versions"])
def test_columns_cannot_be_changed_from_outside(column: str) -> None:
    transcript = build_transcript()
    view = cast("Any", getattr(transcript, column))
    for change in ("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"):
        assert not hasattr(view, change)
    with pytest.raises(TypeError):
        view[0] = 9
    with pytest.raises(TypeError):
        del view[0]
    with pytest.raises(AttributeError):
        setattr(transcript, column, [])
    view[:].clear()
    assert transcript == build_transcript()


def test_a_transcript_does_not_share_the_lists_it_was_restored_from() -> None:
    token_ids = [1, 2]
    transcript = Transcript(token_ids, [False, True], [0.0, -0.5], [0], "history truncated")
    token_ids.clear()
    assert transcript.token_ids == [1, 2]
    assert transcript.reason == "history truncated"


def test_a_column_can_be_replaced_in_a_copy() -> None:
    transcript = build_transcript()
    other = replace(transcript, token_ids=[9, 9, 9, 9, 9])
    assert (other.token_ids[0], transcript.token_ids[0]) == (9, 1)
    other.append_prompt([6])
    assert len(transcript) == 5


def test_a_view_follows_its_transcript_without_a_copy() -> None:
    transcript = Transcript()
    view = transcript.token_ids
    transcript.append_prompt([1, 2])
    assert view == [1, 2] == list(view)
    assert view[-1] == 2
    assert view[1:] == [2]
    assert view == transcript.token_ids
    assert cast("Any", view) != (1, 2)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_is_equal_and_independent(duplicate: Any) -> None:
    transcript = build_transcript()
    other = duplicate(transcript)
    assert other == transcript
    other.append_prompt([6])
    assert len(transcript) == 5
    assert other != transcript
