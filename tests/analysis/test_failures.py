"""Why an episode did not pass: one rule at a time, on episodes of a few turns."""

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


def called(name: str, reply: str = "ok", *, wrong: bool = False, **arguments: object) -> Turn:
    call = ToolCall(id="0", name=name, arguments=arguments)
    answer = Message(role="tool", content=reply, tool_call_id="0", is_error=wrong)
    return turn(Message(role="assistant", tool_calls=(call,)), answer)


def said(text: str) -> Turn:
    return turn(Message(role="assistant", content=text))


def unreadable(text: str = '<tool_call>{"name": </tool_call>') -> Turn:
    return turn(Message(role="assistant", malformed_calls=(text,)))


def turn(action: Message, *replies: Message) -> Turn:
    return Turn(action=action, replies=replies, reward=0.0, engine_seconds=0.0)


def failed(*turns: Turn, ending: Ending = Ending.DONE) -> Trajectory:
    return attempt(0.0, turns=turns, ending=ending)


LOOK = called("list_issues", "title,number")
WRITE = called("update_issue", number=3)
MISSED = called("update_issue", NO_ISSUE, wrong=True, number=20)


def test_what_passed_has_no_class() -> None:
    assert classify(attempt(1.0, turns=(MISSED, said(DONE)))) is None
    assert diagnose(attempt(1.0)) is None


def test_done_with_the_wrong_state_is_a_false_completion() -> None:
    assert classify(failed(LOOK, WRITE, said(DONE))) is FailureClass.FALSE_COMPLETION


def test_an_error_that_the_same_tool_made_good_explains_nothing() -> None:
    assert classify(failed(MISSED, WRITE, said(DONE))) is FailureClass.FALSE_COMPLETION


def test_an_error_of_a_tool_that_writes_is_not_made_good_by_reading() -> None:
    assert classify(failed(MISSED, LOOK, said(DONE))) is FailureClass.NOT_FOUND


def test_an_error_of_a_tool_that_reads_is_made_good_by_any_that_works() -> None:
    missed = called("get_issue", NO_ISSUE, wrong=True, number=20)
    assert classify(failed(missed, WRITE, said(DONE))) is FailureClass.FALSE_COMPLETION


def test_a_tool_that_does_not_exist_is_made_good_by_any_that_works() -> None:
    wrong = called("set_issue", "Error: no tool 'set_issue'; tools: list_issues", wrong=True)
    assert classify(failed(wrong, said(DONE))) is FailureClass.MALFORMED_CALL
    assert classify(failed(wrong, WRITE, said(DONE))) is FailureClass.FALSE_COMPLETION


def test_most_of_the_standing_errors_decide_and_of_equals_the_earlier() -> None:
    assert classify(failed(MISSED, unreadable(), said(DONE))) is FailureClass.NOT_FOUND
    assert classify(failed(unreadable(), MISSED, said(DONE))) is FailureClass.MALFORMED_CALL
    two = failed(MISSED, unreadable(), unreadable(), said(DONE))
    assert classify(two) is FailureClass.MALFORMED_CALL


def test_a_cut_off_episode_is_not_blamed_on_its_only_error() -> None:
    cut = failed(LOOK, MISSED, ending=Ending.MAX_TURNS)
    assert classify(cut) is FailureClass.OUT_OF_TURNS
    again = failed(LOOK, unreadable("{"), unreadable("{{"), ending=Ending.CONTEXT_FULL)
    assert classify(again) is FailureClass.MALFORMED_CALL


def test_the_same_call_three_times_at_the_end_is_a_loop() -> None:
    assert classify(failed(LOOK, LOOK, LOOK, ending=Ending.MAX_TURNS)) is FailureClass.LOOP
    assert classify(failed(LOOK, LOOK, WRITE, said(DONE))) is FailureClass.FALSE_COMPLETION


def test_two_calls_in_turn_are_a_loop_and_numbers_in_replies_do_not_matter() -> None:
    booked = [called("create", f"id: {n}", room=1) for n in (7, 8, 9)]
    circle = [each for one in booked for each in (LOOK, one)]
    assert classify(failed(*circle, ending=Ending.MAX_TURNS)) is FailureClass.LOOP


def test_scrolling_through_other_pictures_is_no_loop() -> None:
    def scrolled(data: bytes) -> Turn:
        call = ToolCall(id="0", name="computer", arguments={"action": "scroll"})
        seen = Message(role="tool", content=(Image(data),), tool_call_id="0")
        return turn(Message(role="assistant", tool_calls=(call,)), seen)

    pages = [scrolled(bytes([n])) for n in range(4)]
    assert classify(failed(*pages, ending=Ending.MAX_TURNS)) is FailureClass.OUT_OF_TURNS
    assert classify(failed(*pages[:1] * 4, ending=Ending.MAX_TURNS)) is FailureClass.LOOP


def test_an_answer_that_repeats_itself_to_its_limit_is_a_repetition() -> None:
    assert classify(failed(said("so " * 60), ending=Ending.LENGTH)) is FailureClass.LOOP
    essay = " ".join(map(str, range(200)))
    assert classify(failed(said(essay), ending=Ending.LENGTH)) is FailureClass.CONTEXT_OVERFLOW


def test_retrying_what_a_service_limits_is_no_loop() -> None:
    limited = called("update_issue", "429 Too Many Requests", wrong=True)
    assert classify(failed(*[limited] * 4, said(DONE))) is FailureClass.LIMIT


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([said(DONE)], FailureClass.GAVE_UP),
        ([called("submit_final_answer", "7", answer="7")], FailureClass.GAVE_UP),
        ([LOOK, said(f"I was not able to find it. {DONE}")], FailureClass.GAVE_UP),
        ([LOOK, called("transfer_to_human_agents")], FailureClass.GAVE_UP),
        ([said(f"I have closed the issue. {DONE}")], FailureClass.FALSE_COMPLETION),
        ([MISSED, said(f"I cannot do this. {DONE}")], FailureClass.NOT_FOUND),
    ],
)
def test_giving_up_is_not_trying_or_saying_that_one_cannot(
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
def test_an_exception_is_classed_by_what_it_says(detail: str, expected: FailureClass) -> None:
    episode = replace(
        attempt(None, ending=Ending.FAILED), failure=Failure(kind="EnvError", detail=detail)
    )
    assert classify(episode) is expected


def test_an_unknown_grade_is_the_verifiers_fault_whatever_the_agent_did() -> None:
    assert classify(attempt(None, turns=(MISSED, said(DONE)))) is FailureClass.VERIFIER_FAULT


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("EnvError", FailureClass.ENVIRONMENT_FAULT),
        ("RefusedError", FailureClass.ENVIRONMENT_FAULT),
        ("VerifierError", FailureClass.VERIFIER_FAULT),
        ("BrokenVerifierError", FailureClass.VERIFIER_FAULT),
        ("EpisodeTimeoutError", FailureClass.VERIFIER_FAULT),
    ],
)
def test_a_grade_is_kept_by_the_env_or_by_its_verifier(kind: str, expected: FailureClass) -> None:
    ungraded = attempt(None, turns=(WRITE, said(DONE)))
    assert classify(replace(ungraded, failure=Failure(kind=kind, detail="gone"))) is expected


def test_an_episode_that_ran_out_of_time_is_a_time_out() -> None:
    assert classify(failed(LOOK, ending=Ending.TIMEOUT)) is FailureClass.LIMIT


def test_an_error_that_nobody_marked_is_read_from_its_beginning() -> None:
    assert is_error_text("Error: order not found")
    assert is_error_text('{"error": "no such user"}')
    assert not is_error_text('{"error": null, "rows": 3}')
    assert not is_error_text("error budget of the team: 3 %")
    plain = called("cancel_order", "Error: order not found", order_id="1")
    assert classify(failed(plain, said(DONE))) is FailureClass.NOT_FOUND


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
        ('the server said: "rate limit exceeded"', FailureClass.LIMIT),
        ("{'error': 'rate limit exceeded'}", FailureClass.LIMIT),
    ],
)
def test_a_complaint_is_about_what_its_words_say(text: str, expected: FailureClass) -> None:
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
def test_names_and_rules_of_a_world_are_not_taken_for_a_services_words(
    text: str, expected: FailureClass
) -> None:
    assert classify_error_text(text) is expected


def test_evidence_names_the_turn_and_keeps_what_was_made_good() -> None:
    diagnosis = diagnose(failed(MISSED, WRITE, said(f"All set. {DONE}")))
    assert diagnosis is not None
    assert (diagnosis.primary.turn, diagnosis.primary.excerpt) == (3, "All set.")
    (seen,) = diagnosis.others
    assert (seen.failure_class, seen.turn, seen.excerpt) == (FailureClass.NOT_FOUND, 1, NO_ISSUE)


def test_counts_leave_out_what_passed() -> None:
    episodes = [attempt(1.0), failed(said(DONE)), failed(MISSED, said(DONE)), failed(said(DONE))]
    assert failure_counts(episodes) == {FailureClass.GAVE_UP: 2, FailureClass.NOT_FOUND: 1}
