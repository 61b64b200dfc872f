"""The rules that recognise failures of a model that plays a user."""

from __future__ import annotations

import pytest

from skyfleet.envs.users.failures import find_failure
from skyfleet.envs.users.scenario import Fact, Scenario

SCENARIO = Scenario(
    opening="How much do I owe?",
    facts=(Fact(text="My PIN is 4711.", asked_by=("pin",)),),
    secrets=("$38.56",),
)
AGENT = ("May I have your PIN?", "Thank you. Which bill is it?")
USER = ("How much do I owe?", "My PIN is 4711.")


def kind_of(text: str, agent: tuple[str, ...] = AGENT, user: tuple[str, ...] = USER) -> str | None:
    failure = find_failure(SCENARIO, agent, user, text)
    return failure.kind.value if failure else None


@pytest.mark.parametrize("text", ["", "   ", "...", "\n"])
def test_a_message_without_words_is_empty(text: str) -> None:
    assert kind_of(text) == "empty_reply"


@pytest.mark.parametrize(
    "text",
    ["The bill of May.", "###STOP###", "Yes, please.", "I think it was $20.00.", "My PIN is 4711."],
)
def test_what_a_customer_may_say_is_no_failure(text: str) -> None:
    assert kind_of(text) is None


def test_three_equal_answers_to_different_questions_are_a_loop() -> None:
    again = "I only want to know the amount."
    assert kind_of(again, AGENT, (again, again)) == "loop"
    assert kind_of(again, AGENT, ("Hello.", again)) is None


def test_an_agent_that_repeats_itself_makes_no_loop() -> None:
    again = "I only want to know the amount."
    assert kind_of(again, ("What?", "What?"), (again, again)) is None


def test_a_sentence_three_times_in_one_message_is_a_loop() -> None:
    assert kind_of("I owe it. I owe it. I owe it.") == "loop"


def test_a_secret_is_leaked_unless_the_agent_has_said_it() -> None:
    assert kind_of("So it is $38.56?") == "leaked_answer"
    assert kind_of("So it is $38.56?", (*AGENT, "You owe $38.56.")) is None
    assert kind_of("So it is $138.56?") is None


@pytest.mark.parametrize(
    "text",
    [
        "As an AI, I have no PIN.",
        "How can I help you today?",
        "User: my PIN is 4711",
        '<tool_call>{"name": "x"}</tool_call>',
        "My instructions say that I should wait.",
    ],
)
def test_a_user_that_is_no_customer_breaks_character(text: str) -> None:
    assert kind_of(text) == "broke_character"


def test_words_of_the_scenario_itself_break_nothing() -> None:
    scenario = Scenario(opening="Did you lose my instructions?")
    assert find_failure(scenario, (), (), "Did you lose my instructions?") is None
