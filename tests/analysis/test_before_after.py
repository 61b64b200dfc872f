"""Behaviour and failures of the same tasks before and after."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.trajectories.making import attempt, transcript

from skyfleet.analysis.before_after import (
    BehaviourChange,
    EpisodeOutcome,
    FailureShift,
    align_turns,
    compare_behaviour,
    compute_failure_shifts,
    find_first_divergence,
    format_action,
)
from skyfleet.analysis.failure_class import FailureClass
from skyfleet.chat.message import Message, ToolCall
from skyfleet.trajectories.trajectory import Trajectory, Turn

LOOP, GAVE_UP = FailureClass.LOOP, FailureClass.GAVE_UP


def turn(name: str, *, is_error: bool = False, **arguments: object) -> Turn:
    action = Message(
        role="assistant", tool_calls=(ToolCall(id="0", name=name, arguments=arguments),)
    )
    reply = Message(role="tool", content="ok", is_error=is_error)
    return Turn(action=action, replies=(reply,), reward=0.0, engine_seconds=0.0)


def episode(*names: str, task_key: str = "t") -> Trajectory:
    return attempt(0.0, task_key=task_key, turns=tuple(map(turn, names)))


def named(changes: Sequence[BehaviourChange], quantity: str) -> BehaviourChange:
    (change,) = [change for change in changes if change.quantity == quantity]
    return change


def test_turns_with_equal_actions_are_aligned() -> None:
    before, after = episode("look", "close", "done"), episode("look", "ask", "ask", "done")
    rows = [
        (one and format_action(one.action), other and format_action(other.action))
        for one, other in align_turns(before, after)
    ]
    assert rows == [
        ("look({})", "look({})"),
        ("close({})", "ask({})"),
        (None, "ask({})"),
        ("done({})", "done({})"),
    ]


def test_turns_before_the_first_difference_pair_by_number() -> None:
    before, after = episode("a", "b"), episode("a", "a", "b")
    assert find_first_divergence(before, after) == 1
    assert align_turns(before, after)[0] == (before.turns[0], after.turns[0])
    assert [one is not None for one, _ in align_turns(before, after)] == [True, False, True]


@pytest.mark.parametrize(
    ("before", "after", "at"),
    [
        (("a", "b"), ("a", "c"), 1),
        (("a", "b"), ("a",), 1),
        ((), ("a",), 0),
        (("a", "b"), ("a", "b"), None),
    ],
)
def test_the_first_divergence_is_the_first_action_that_differs(
    before: tuple[str, ...], after: tuple[str, ...], at: int | None
) -> None:
    assert find_first_divergence(episode(*before), episode(*after)) == at


def test_actions_differ_by_their_arguments_but_not_by_argument_order() -> None:
    one, other = turn("a", x=1, y=2), turn("a", y=2, x=1)
    assert format_action(one.action) == format_action(other.action) == 'a({"x": 1, "y": 2})'
    assert format_action(turn("a", x=2, y=2).action) != format_action(one.action)


def test_attempts_are_averaged_per_task_and_unpaired_tasks_are_left_out() -> None:
    before = [episode("a"), episode("a", "b", "b"), episode("a", task_key="only before")]
    after = [episode("b", "b", "b", "b")]
    changes = compare_behaviour(before, after)
    assert [change.quantity for change in changes] == [
        "turns",
        "tool calls",
        "tool errors",
        "malformed calls",
        "sampled tokens",
        "calls of a",
        "calls of b",
    ]
    turns = named(changes, "turns")
    assert (turns.n_tasks, turns.before, turns.after, turns.difference) == (1, 2.0, 4.0, 2.0)
    assert (named(changes, "calls of a").before, named(changes, "calls of a").after) == (1.0, 0.0)
    assert (named(changes, "calls of b").before, named(changes, "calls of b").after) == (1.0, 4.0)


def test_errors_malformed_calls_and_tokens_are_counted() -> None:
    faulty = attempt(0.0, turns=(turn("a", is_error=True),), transcripts=(transcript(5),))
    torn = Message(role="assistant", malformed_calls=("{", "{"))
    silent = Turn(action=torn, replies=(), reward=0.0, engine_seconds=0.0)
    changes = compare_behaviour([faulty], [attempt(0.0, turns=(silent,))])
    assert (named(changes, "tool errors").before, named(changes, "tool errors").after) == (1, 0)
    assert named(changes, "malformed calls").difference == 2
    assert named(changes, "sampled tokens").difference == -5


def test_a_change_in_every_task_is_clear_and_a_mixed_one_is_not() -> None:
    before = [episode("a", task_key=f"t{n}") for n in range(20)]
    longer = [episode("a", *(["a"] * (1 + n % 3)), task_key=f"t{n}") for n in range(20)]
    mixed = [episode(*(["a"] * (2 * (n % 2))), task_key=f"t{n}") for n in range(20)]
    up = named(compare_behaviour(before, longer), "turns")
    # 1, 2, 3 in turn: seven tasks by 1, seven by 2, six by 3.
    assert up.difference == pytest.approx(39 / 20)
    assert up.is_clear
    assert 1 < up.interval[0] < 39 / 20 < up.interval[1] < 3
    assert not named(compare_behaviour(before, mixed), "turns").is_clear


def test_a_change_in_few_tasks_is_not_clear() -> None:
    before = [episode("a", task_key=f"t{n}") for n in range(3)]
    after = [episode("a", "a", task_key=f"t{n}") for n in range(3)]
    change = named(compare_behaviour(before, after), "turns")
    assert change.interval == (1.0, 1.0)
    assert not change.is_clear


def test_unrecorded_tokens_are_not_measured() -> None:
    changes = compare_behaviour([episode("a")], [episode("a")])
    assert [change.quantity for change in changes if not change.is_measured] == ["sampled tokens"]
    counted = attempt(0.0, turns=(turn("a"),), transcripts=(transcript(1),))
    assert named(compare_behaviour([episode("a")], [counted]), "sampled tokens").is_measured


def named_shift(shifts: Sequence[FailureShift], name: str) -> FailureShift:
    (shift,) = [shift for shift in shifts if shift.name == name]
    return shift


def test_failure_shares_are_averaged_per_task_and_unpaired_tasks_are_left_out() -> None:
    before: list[EpisodeOutcome] = [
        ("a", LOOP),
        ("a", LOOP),
        ("a", None),
        ("b", GAVE_UP),
        ("x", LOOP),
    ]
    after: list[EpisodeOutcome] = [("a", None), ("b", None), ("b", GAVE_UP)]
    shifts = compute_failure_shifts(before, after)
    assert [shift.name for shift in shifts] == ["passed", GAVE_UP, LOOP]
    loop = named_shift(shifts, LOOP)
    # The two common tasks have 2/3 and 0 before, and 0 after.
    assert loop.n_tasks == 2
    assert (loop.before, loop.after) == pytest.approx((1 / 3, 0.0))
    assert named_shift(shifts, "passed").difference == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert sum(shift.difference for shift in shifts) == pytest.approx(0)


def test_a_shift_of_most_tasks_is_clear_and_a_mixed_one_is_not() -> None:
    before: list[EpisodeOutcome] = [(n, LOOP if n < 16 else None) for n in range(20)]
    after: list[EpisodeOutcome] = [(n, LOOP if n in (0, 18, 19) else None) for n in range(20)]
    loop = named_shift(compute_failure_shifts(before, after), LOOP)
    low, high = loop.interval
    assert loop.difference == pytest.approx(-13 / 20)
    assert low < loop.difference < high < 0
    assert loop.is_clear
    swapped: list[EpisodeOutcome] = [(n, LOOP if n >= 4 else None) for n in range(20)]
    assert not named_shift(compute_failure_shifts(before, swapped), LOOP).is_clear


def test_sets_without_a_common_task_have_no_shift() -> None:
    assert compute_failure_shifts([("a", LOOP)], [("b", LOOP)]) == []
