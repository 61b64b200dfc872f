"""Failure classification, one rule at a time, on short episodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.trajectories.making import attempt

from skyfleet.analysis.failure_class import FailureClass, classify_error_text, is_error_text
from skyfleet.analysis.failures import classify, diagnose, failure_counts
from skyfleet.chat.message import Image, Message, ToolCall
from skyfleet.trajectories.trajectory import Ending, Failure, Trajectory, Turn

DONE = "<done>"
NO_ISSUE = "Error: no issue 20; list_issues shows the numbers"


def call_turn(name: str, reply: str = "ok", *, wrong: bool = False, **arguments: object) -> Turn:
    call = ToolCall(id="0", name=name, arguments=arguments)
    answer = Message(role="tool", content=reply, tool_call_id="0", is_error=wrong)
    return turn(Message(role="assistant", tool_calls=(call,)), answer)


def text_turn(text: str) -> Turn:
    return turn(Message(role="assistant", content=text))


def malformed_turn(text: str = '<tool_call>{"name": </tool_call>') -> Turn:
    return turn(Message(role="assistant", malformed_calls=(text,)))


def turn(action: Message, *replies: Message) -> Turn:
    return Turn(action=action, replies=replies, reward=0.0, engine_seconds=0.0)


def failed(*turns: Turn, ending: Ending = Ending.DONE) -> Trajectory:
    return attempt(0.0, turns=turns, ending=ending)


LOOK = call_turn("list_issues", "title,number")
WRITE = call_turn("update_issue", number=3)
MISSED = call_turn("update_issue", NO_ISSUE, wrong=True, number=20)


def test_a_passed_episode_has_no_class() -> None:
    assert classify(attempt(1.0, turns=(MISSED, text_turn(DONE)))) is None
    assert diagnose(attempt(1.0)) is None


def test_done_with_the_wrong_state_is_a_false_completion() -> None:
    assert classify(failed(LOOK, WRITE, text_turn(DONE))) is FailureClass.FALSE_COMPLETION


def test_a_later_success_of_the_same_tool_resolves_an_error() -> None:
    assert classify(failed(MISSED, WRITE, text_turn(DONE))) is FailureClass.FALSE_COMPLETION


def test_a_read_does_not_resolve_the_error_of_a_writing_tool() -> None:
    assert classify(failed(MISSED, LOOK, text_turn(DONE))) is FailureClass.NOT_FOUND


def test_any_success_resolves_the_error_of_a_read() -> None:
    missed = call_turn("get_issue", NO_ISSUE, wrong=True, number=20)
    assert classify(failed(missed, WRITE, text_turn(DONE))) is FailureClass.FALSE_COMPLETION


def test_any_success_resolves_a_call_of_an_unknown_tool() -> None:
    wrong = call_turn("set_issue", "Error: no tool 'set_issue'; tools: list_issues", wrong=True)
    assert classify(failed(wrong, text_turn(DONE))) is FailureClass.MALFORMED_CALL
    assert classify(failed(wrong, WRITE, text_turn(DONE))) is FailureClass.FALSE_COMPLETION


def test_the_most_frequent_unresolved_class_decides_and_ties_go_to_the_earlier() -> None:
    assert classify(failed(MISSED, malformed_turn(), text_turn(DONE))) is FailureClass.NOT_FOUND
    assert (
        classify(failed(malformed_turn(), MISSED, text_turn(DONE))) is FailureClass.MALFORMED_CALL
    )
    two = failed(MISSED, malformed_turn(), malformed_turn(), text_turn(DONE))
    assert classify(two) is FailureClass.MALFORMED_CALL


def test_a_truncated_episode_is_not_classified_by_its_only_error() -> None:
    cut = failed(LOOK, MISSED, ending=Ending.MAX_TURNS)
    assert classify(cut) is FailureClass.OUT_OF_TURNS
    again = failed(LOOK, malformed_turn("{"), malformed_turn("{{"), ending=Ending.CONTEXT_FULL)
    assert classify(again) is FailureClass.MALFORMED_CALL


def test_the_same_call_three_times_at_the_end_is_a_loop() -> None:
    assert classify(failed(LOOK, LOOK, LOOK, ending=Ending.MAX_TURNS)) is FailureClass.LOOP
    assert classify(failed(LOOK, LOOK, WRITE, text_turn(DONE))) is FailureClass.FALSE_COMPLETION


def test_alternating_calls_are_a_loop_and_digits_in_replies_are_ignored() -> None:
    booked = [call_turn("create", f"id: {n}", room=1) for n in (7, 8, 9)]
    circle = [each for one in booked for each in (LOOK, one)]
    assert classify(failed(*circle, ending=Ending.MAX_TURNS)) is FailureClass.LOOP


def test_the_same_call_with_different_images_is_not_a_loop() -> None:
    def scrolled(data: bytes) -> Turn:
        call = ToolCall(id="0", name="computer", arguments={"action": "scroll"})
        seen = Message(role="tool", content=(Image(data),), tool_call_id="0")
        return turn(Message(role="assistant", tool_calls=(call,)), seen)

    pages = [scrolled(bytes([n])) for n in range(4)]
    assert classify(failed(*pages, ending=Ending.MAX_TURNS)) is FailureClass.OUT_OF_TURNS
    assert classify(failed(*pages[:1] * 4, ending=Ending.MAX_TURNS)) is FailureClass.LOOP


def test_text_that_repeats_up_to_the_length_limit_is_a_loop() -> None:
    assert classify(failed(text_turn("so " * 60), ending=Ending.LENGTH)) is FailureClass.LOOP
    essay = " ".join(map(str, range(200)))
    assert classify(failed(text_turn(essay), ending=Ending.LENGTH)) is FailureClass.CONTEXT_OVERFLOW


def test_retries_after_a_rate_limit_are_not_a_loop() -> None:
    limited = call_turn("update_issue", "429 Too Many Requests", wrong=True)
    assert classify(failed(*[limited] * 4, text_turn(DONE))) is FailureClass.LIMIT


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([text_turn(DONE)], FailureClass.GAVE_UP),
        ([call_turn("submit_final_answer", "7", answer="7")], FailureClass.GAVE_UP),
        ([LOOK, text_turn(f"I was not able to find it. {DONE}")], FailureClass.GAVE_UP),
        ([LOOK, call_turn("transfer_to_human_agents")], FailureClass.GAVE_UP),
        ([text_turn(f"I have closed the issue. {DONE}")], FailureClass.FALSE_COMPLETION),
        ([MISSED, text_turn(f"I cannot do this. {DONE}")], FailureClass.NOT_FOUND),
    ],
)
def test_stopping_without_trying_or_with_a_refusal_is_giving_up(
    turns: list[Turn], expected: FailureClass
) -> None:
    assert classify(failed(*turns)) is expected


@pytest.mark.parametrize(
    ("detail", "expected"),
    [
        ("step: RuntimeError: the page crashed", FailureClass.ENVIRONMENT_FAULT),
        ("tool list: no answer after 90 s; it hangs", FailureClass.LIMIT),
        ("400 maximum context length is 32768 tokens", FailureClass.CONTEXT_OVERFLOW),
    ],
)
def test_an_exception_is_classified_by_its_text(detail: str, expected: FailureClass) -> None:
    episode = replace(
        attempt(None, ending=Ending.FAILED), failure=Failure(kind="EnvError", detail=detail)
    )
    assert classify(episode) is expected


def test_an_ungraded_episode_is_a_verifier_fault() -> None:
    assert classify(attempt(None, turns=(MISSED, text_turn(DONE)))) is FailureClass.VERIFIER_FAULT


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("EnvError", FailureClass.ENVIRONMENT_FAULT),
        ("RefusedError", FailureClass.ENVIRONMENT_FAULT),
        ("VerifierError", FailureClass.VERIFIER_FAULT),
        ("BrokenVerifierError", FailureClass.VERIFIER_FAULT),
        ("EpisodeTimeoutError", FailureClass.VERIFIER_FAULT),
        ("OvertimeError", FailureClass.VERIFIER_FAULT),  # its name in older recordings
    ],
)
def test_a_missing_grade_is_attributed_by_the_exception(kind: str, expected: FailureClass) -> None:
    ungraded = attempt(None, turns=(WRITE, text_turn(DONE)))
    assert classify(replace(ungraded, failure=Failure(kind=kind, detail="gone"))) is expected


def test_an_episode_over_its_time_limit_is_a_time_out() -> None:
    assert classify(failed(LOOK, ending=Ending.TIMEOUT)) is FailureClass.LIMIT


def test_an_unflagged_error_is_recognised_by_its_start() -> None:
    assert is_error_text("Error: order not found")
    assert is_error_text('{"error": "no such user"}')
    assert not is_error_text('{"error": null, "rows": 3}')
    assert not is_error_text("error budget of the team: 3 %")
    plain = call_turn("cancel_order", "Error: order not found", order_id="1")
    assert classify(failed(plain, text_turn(DONE))) is FailureClass.NOT_FOUND


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("update_issue has no 'colour'; it takes number, state", FailureClass.WRONG_ARGUMENTS),
        ("room 15 is taken on Friday; free: 12", FailureClass.WRONG_ARGUMENTS),
        ("the price is 500; give at most 404", FailureClass.WRONG_ARGUMENTS),
        ("web has no label 'bug'; create_label first", FailureClass.NOT_FOUND),
        ("Error code: 404 - {}", FailureClass.NOT_FOUND),
        ("only members write in chess; join_subreddit first", FailureClass.UNAUTHORISED),
        ("HTTP 503 Service Unavailable", FailureClass.LIMIT),
        ("Unknown tool: create", FailureClass.MALFORMED_CALL),
        ("MCP error -32603: Internal error", FailureClass.ENVIRONMENT_FAULT),
        ("users may not post here", FailureClass.UNAUTHORISED),
        ("you are not allowed to close it", FailureClass.UNAUTHORISED),
        ("you don't own this; it isn't yours", FailureClass.UNAUTHORISED),
        ("No space left on device", FailureClass.ENVIRONMENT_FAULT),
        ('the server text_turn: "rate limit exceeded"', FailureClass.LIMIT),
        ("{'error': 'rate limit exceeded'}", FailureClass.LIMIT),
    ],
)
def test_an_error_is_classified_by_its_text(text: str, expected: FailureClass) -> None:
    assert classify_error_text(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("update_issue has no 'timeout'; it takes number, state", FailureClass.WRONG_ARGUMENTS),
        ("deadline: Input should be a valid date", FailureClass.WRONG_ARGUMENTS),
        ("the deadline lies in the past", FailureClass.WRONG_ARGUMENTS),
        ("the title may not be empty", FailureClass.WRONG_ARGUMENTS),
        ("negative prices are not allowed", FailureClass.WRONG_ARGUMENTS),
        ("no more than 5 guests", FailureClass.WRONG_ARGUMENTS),
        ("no space left on the wishlist", FailureClass.WRONG_ARGUMENTS),
        ("timeout must be positive", FailureClass.WRONG_ARGUMENTS),
        ("no issue 'Login timeout on mobile'", FailureClass.NOT_FOUND),
        ("no file '/etc/permissions.txt'", FailureClass.NOT_FOUND),
        ("no quotation 5", FailureClass.NOT_FOUND),
    ],
)
def test_names_and_rules_of_an_environment_do_not_match_service_errors(
    text: str, expected: FailureClass
) -> None:
    assert classify_error_text(text) is expected


def test_evidence_names_the_turn_and_includes_resolved_errors() -> None:
    diagnosis = diagnose(failed(MISSED, WRITE, text_turn(f"All set. {DONE}")))
    assert diagnosis is not None
    assert (diagnosis.primary.turn, diagnosis.primary.excerpt) == (3, "All set.")
    (seen,) = diagnosis.others
    assert (seen.failure_class, seen.turn, seen.excerpt) == (FailureClass.NOT_FOUND, 1, NO_ISSUE)


def test_counts_leave_out_passed_episodes() -> None:
    episodes = [
        attempt(1.0),
        failed(text_turn(DONE)),
        failed(MISSED, text_turn(DONE)),
        failed(text_turn(DONE)),
    ]
    assert failure_counts(episodes) == {FailureClass.GAVE_UP: 2, FailureClass.NOT_FOUND: 1}
