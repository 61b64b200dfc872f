"""Two episodes side by side part where their first different action is, and words say how."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

from tests.analysis.viewer_run import called, early, plain_episode, rich

from skyfleet.analysis.viewer.episode_diff import compare_episodes, diff_words
from skyfleet.trajectories.trajectory import Trajectory


def pressed(*buttons: str) -> Trajectory:
    """One turn a button."""
    turns = tuple(called("press", {"button": button}, "ok") for button in buttons)
    return replace(plain_episode(0), turns=turns)


def facing(left: Trajectory, right: Trajectory) -> list[tuple[int | None, int | None, bool]]:
    """Which turns stand side by side, and whether they do the same."""
    return [
        (
            row["left"] and row["left"]["turn"],
            row["right"] and row["right"]["turn"],
            row["same_action"],
        )
        for row in compare_episodes(left, right)["rows"]
    ]


def test_equal_episodes_never_part() -> None:
    told = compare_episodes(rich(), rich())
    assert told["first_difference"] is None
    assert told["same_opening"]
    assert [row["same_replies"] for row in told["rows"]] == [True] * 6


def test_the_first_different_action_is_named_and_later_equal_ones_face_each_other() -> None:
    told = compare_episodes(early(), rich())
    assert told["first_difference"] == 1
    assert facing(early(), rich())[:2] == [(1, 1, True), (2, 2, False)]
    assert facing(pressed("a", "b", "d"), pressed("a", "c", "b", "d")) == [
        (1, 1, True),
        (None, 2, False),
        (2, 3, True),
        (3, 4, True),
    ]


def test_a_longer_match_further_on_does_not_hide_where_they_part() -> None:
    left, right = pressed("a", "b", "a", "b", "c"), pressed("a", "b", "c")
    assert compare_episodes(left, right)["first_difference"] == 2
    assert facing(left, right)[:2] == [(1, 1, True), (2, 2, True)]


def test_an_episode_that_stops_early_parts_there() -> None:
    assert compare_episodes(pressed("a"), pressed("a", "b"))["first_difference"] == 1
    assert facing(pressed("a"), pressed("a", "b")) == [(1, 1, True), (None, 2, False)]


def test_reasoning_alone_is_no_different_action_and_another_answer_is_told() -> None:
    aloud = called("press", {"button": "a"}, "refused", reasoning="first a", error=True)
    told = compare_episodes(pressed("a"), replace(pressed("a"), turns=(aloud,)))
    assert told["first_difference"] is None
    (row,) = told["rows"]
    assert (row["same_action"], row["same_replies"]) == (True, False)
    assert (row["left"]["is_error"], row["right"]["is_error"]) == (False, True)


def test_only_the_words_that_differ_are_marked() -> None:
    left, right = diff_words('{"number": 24}', '{"number": 2}')
    assert left == [('{"number": ', False), ("24", True), ("}", False)]
    assert right == [('{"number": ', False), ("2", True), ("}", False)]
    assert diff_words("same", "same") == ([("same", False)], [("same", False)])
    assert diff_words("", "new") == ([], [("new", True)])


def test_nothing_is_lost_in_pieces_however_long_the_text_and_soon() -> None:
    begun = perf_counter()
    for words in (990, 100_000):
        left, right = "a b " * (words // 2), "b a " * (words // 2)
        pieces = diff_words(left, right)
        assert ["".join(text for text, _ in side) for side in pieces] == [left, right]
    assert perf_counter() - begun < 5
