"""Two episodes are aligned and compared up to single words."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

from tests.analysis.viewer_run import called, early, plain_episode, rich

from skyfleet.analysis.viewer.episode_diff import compare_episodes, diff_words
from skyfleet.trajectories.trajectory import Trajectory


def pressed(*buttons: str) -> Trajectory:
    """One turn per button."""
    turns = tuple(called("press", {"button": button}, "ok") for button in buttons)
    return replace(plain_episode(0), turns=turns)


def align(left: Trajectory, right: Trajectory) -> list[tuple[int | None, int | None, bool]]:
    """The aligned turns, and whether their actions are equal."""
    return [
        (
            row["left"] and row["left"]["turn"],
            row["right"] and row["right"]["turn"],
            row["same_action"],
        )
        for row in compare_episodes(left, right)["rows"]
    ]


def test_equal_episodes_have_no_difference() -> None:
    result = compare_episodes(rich(), rich())
    assert result["first_difference"] is None
    assert result["same_prompt"]
    assert [row["same_replies"] for row in result["rows"]] == [True] * 6


def test_the_first_different_action_is_named_and_later_equal_ones_are_aligned() -> None:
    result = compare_episodes(early(), rich())
    assert result["first_difference"] == 1
    assert align(early(), rich())[:2] == [(1, 1, True), (2, 2, False)]
    assert align(pressed("a", "b", "d"), pressed("a", "c", "b", "d")) == [
        (1, 1, True),
        (None, 2, False),
        (2, 3, True),
        (3, 4, True),
    ]


def test_a_longer_match_later_does_not_hide_the_first_difference() -> None:
    left, right = pressed("a", "b", "a", "b", "c"), pressed("a", "b", "c")
    assert compare_episodes(left, right)["first_difference"] == 2
    assert align(left, right)[:2] == [(1, 1, True), (2, 2, True)]


def test_an_episode_that_stops_early_differs_there() -> None:
    assert compare_episodes(pressed("a"), pressed("a", "b"))["first_difference"] == 1
    assert align(pressed("a"), pressed("a", "b")) == [(1, 1, True), (None, 2, False)]


def test_reasoning_is_not_compared_and_different_replies_are_marked() -> None:
    aloud = called("press", {"button": "a"}, "refused", reasoning="first a", error=True)
    result = compare_episodes(pressed("a"), replace(pressed("a"), turns=(aloud,)))
    assert result["first_difference"] is None
    (row,) = result["rows"]
    assert (row["same_action"], row["same_replies"]) == (True, False)
    assert (row["left"]["is_error"], row["right"]["is_error"]) == (False, True)


def test_only_different_words_are_marked() -> None:
    left, right = diff_words('{"number": 24}', '{"number": 2}')
    assert left == [('{"number": ', False), ("24", True), ("}", False)]
    assert right == [('{"number": ', False), ("2", True), ("}", False)]
    assert diff_words("same", "same") == ([("same", False)], [("same", False)])
    assert diff_words("", "new") == ([], [("new", True)])


def test_long_texts_are_complete_and_fast_to_compare() -> None:
    begun = perf_counter()
    for words in (990, 100_000):
        left, right = "a b " * (words // 2), "b a " * (words // 2)
        pieces = diff_words(left, right)
        assert ["".join(text for text, _ in side) for side in pieces] == [left, right]
    assert perf_counter() - begun < 5
