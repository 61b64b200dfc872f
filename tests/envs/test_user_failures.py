"""The rules that recognise failures of a model that plays a user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.user_failures import DATA, Scores, find_kinds

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


def test_a_secret_is_leaked_unless_the_agent_named_it_before() -> None:
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


@pytest.mark.skipif(
    not (DATA / "user_dialogues.jsonl").exists(),
    reason="no dialogues: python -m benchmarks.user_dialogues tests/data/user_dialogues.jsonl",
)
def test_the_rules_are_measured_on_two_hundred_dialogues_half_of_them_by_a_model() -> None:
    lines = (DATA / "user_dialogues.jsonl").read_text().splitlines()
    dialogues = {row["id"]: row for row in map(json.loads, lines)}
    sources = json.loads((DATA / "user_dialogues_sources.json").read_text())
    assert len(dialogues) == len(lines) >= 200
    assert sources.keys() == dialogues.keys()
    assert sum(source == "smollm2" for source in sources.values()) * 2 >= len(lines)
    for row in dialogues.values():
        assert row["messages"][0]["role"] == "user"
        assert find_kinds(row) <= {"empty_reply", "loop", "leaked_answer", "broke_character"}
    # What the rules find is in no file that a labeller reads.
    assert "source" not in Path(DATA / "user_dialogues.jsonl").read_text()[:10_000]


def test_precision_and_recall_count_dialogues() -> None:
    scores = Scores.of(found=["a", "b", "c", "d"], labelled=["a", "b", "c", "e", "f"])
    assert (scores.n_found, scores.n_labelled, scores.n_both) == (4, 5, 3)
    assert "0.75 (" in scores.format()
    assert "0.60 (" in scores.format()
