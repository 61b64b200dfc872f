"""Scripted and rule-based users: what they say, when they change their mind, when they stop."""

from __future__ import annotations

import asyncio

import pytest

from skyfleet.config.environment import Environment
from skyfleet.config.root import RunConfig
from skyfleet.config.simulated_user import SimulatedUser
from skyfleet.envs.users.factory import build_user_factory
from skyfleet.envs.users.scenario import Fact, Scenario, read_scenario
from skyfleet.envs.users.scripted import CONFIRMED, GOODBYE, UNKNOWN, RuleBasedUser, ScriptedUser
from skyfleet.envs.users.timed import TimedUser
from skyfleet.envs.users.user import User, UserFailureKind, UserTurn
from skyfleet.errors import EngineError, TaskError
from skyfleet.tasks.task import Task

SCENARIO = Scenario(
    opening="I want a bigger plan.",
    facts=(
        Fact(text="My name is Ana Kim.", asked_by=("name",)),
        Fact(text="My PIN is 4711.", asked_by=("pin", "passcode")),
    ),
    changes_of_mind=("No, make it Max.",),
    declines=(Fact(text="I do not give card numbers.", asked_by=("card number",)),),
    objections=("But I insist.",),
)


async def test_a_rule_based_user_reveals_a_fact_only_when_it_is_asked_for_it() -> None:
    user = RuleBasedUser(SCENARIO)
    assert (await user.open()).text == "I want a bigger plan."
    assert (await user.reply("May I have your name?")).text == "My name is Ana Kim."
    assert (await user.reply("Please tell me your passcode.")).text == "My PIN is 4711."
    assert (await user.reply("What was your name again?")).text == "My name is Ana Kim."
    assert (await user.reply("Where do you live?")).text == UNKNOWN


async def test_one_question_for_two_facts_gets_both() -> None:
    turn = await RuleBasedUser(SCENARIO).reply("May I have your name and your PIN?")
    assert turn.text == "My name is Ana Kim. My PIN is 4711."


async def test_a_statement_that_mentions_a_fact_does_not_ask_for_it() -> None:
    turn = await RuleBasedUser(SCENARIO).reply("Let me check the name first.")
    assert "Ana" not in turn.text
    assert not turn.is_done


async def test_a_change_of_mind_comes_with_the_first_confirmation_then_yes() -> None:
    user = RuleBasedUser(SCENARIO)
    assert (await user.reply("I will change it to Plus. Shall I go ahead?")).text == (
        "No, make it Max."
    )
    assert (await user.reply("Then Max. Do you want me to proceed?")).text == CONFIRMED


@pytest.mark.parametrize("kind", [RuleBasedUser, ScriptedUser])
async def test_what_the_policy_forbids_to_ask_is_refused(kind: type[RuleBasedUser]) -> None:
    turn = await kind(SCENARIO).reply("What is your card number?")
    assert turn.text == "I do not give card numbers."


async def test_a_user_objects_once_and_then_stops() -> None:
    user = RuleBasedUser(SCENARIO)
    refused = await user.reply("Rule R3 forbids that.")
    assert (refused.text, refused.is_done) == ("But I insist.", False)
    stopped = await user.reply("I am sorry, R3 has no exception.")
    assert (stopped.text, stopped.is_done) == (GOODBYE, True)


async def test_an_offer_of_more_help_ends_the_conversation() -> None:
    turn = await RuleBasedUser(SCENARIO).reply("Is there anything else I can do for you?")
    assert turn.is_done


async def test_a_scripted_user_opens_with_everything_and_says_it_again() -> None:
    user = ScriptedUser(SCENARIO)
    everything = "I want a bigger plan. My name is Ana Kim. My PIN is 4711."
    assert (await user.open()).text == everything
    assert (await user.reply("Where do you live?")).text == everything
    assert (await user.reply("Which name is that?")).text == "My name is Ana Kim."
    assert (await user.reply("I do it now. Is that correct?")).text == "No, make it Max."


class _SlowUser:
    is_closed = False

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def open(self) -> UserTurn:
        return UserTurn(text="hello")

    async def reply(self, agent_message: str) -> UserTurn:
        if self._error is not None:
            raise self._error
        await asyncio.sleep(3600)
        raise AssertionError

    async def aclose(self) -> None:
        self.is_closed = True


async def test_a_late_message_is_a_failure_as_a_value() -> None:
    user = TimedUser(_SlowUser(), timeout_seconds=0.01)
    assert (await user.open()).text == "hello"
    turn = await user.reply("And?")
    assert turn.is_done
    assert turn.failure is not None
    assert turn.failure.kind == UserFailureKind.TIMEOUT
    assert "environment.user.timeout_seconds" in turn.failure.detail


async def test_an_endpoint_error_is_a_failure_as_a_value_and_a_bug_is_not() -> None:
    turn = await TimedUser(_SlowUser(EngineError("gone")), timeout_seconds=1).reply("And?")
    assert turn.failure is not None
    assert (turn.failure.kind, turn.failure.detail) == (UserFailureKind.ENDPOINT, "gone")
    with pytest.raises(ZeroDivisionError):
        await TimedUser(_SlowUser(ZeroDivisionError()), timeout_seconds=1).reply("And?")


async def test_a_run_has_the_kind_of_user_that_its_configuration_names() -> None:
    def make(**keys: object) -> User:
        section = SimulatedUser.model_validate(keys)
        config = RunConfig(environment=Environment(user=section))
        return build_user_factory(config)(SCENARIO, "session")

    assert (await make().open()).text == SCENARIO.statement
    assert (await make(user_strategy="rule_based").open()).text == SCENARIO.opening


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, "user_model=null"),
        ({"user_model": "gpt"}, "base_url=null"),
        ({"user_provider": "policy", "user_model": "x"}, "user_provider=policy"),
    ],
)
def test_a_model_user_without_its_model_is_refused_in_one_sentence(
    keys: dict[str, str], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        SimulatedUser.model_validate({"user_strategy": "llm", **keys})


@pytest.mark.parametrize("user", [None, {"opening": 3}, {"opening": "a", "fact": []}])
def test_a_row_without_a_valid_scenario_names_the_key(user: object) -> None:
    task = Task(key="t", env_key="telecom", prompt="p", metadata={"user": user} if user else {})
    with pytest.raises(TaskError, match=r"task t: metadata\.user"):
        read_scenario(task)
