"""tau-bench runs from a checkout: its tools, its user, its verdict; here a small package of its layout."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.tau_checkouts import tau_bench_checkout

import skyfleet as sf
from skyfleet.chat.message import Message, ToolCall
from skyfleet.config.loading import load_config
from skyfleet.curation.inspection import Inspectable, build_inspectable_factory
from skyfleet.curation.replay import replay
from skyfleet.curation.verdict import Reason
from skyfleet.envs.env import DONE, Env
from skyfleet.envs.registry import env_factory
from skyfleet.envs.tau.conversation import NOT_CALLED, TOO_LARGE, ConversationEnv
from skyfleet.envs.tau.sources import tau_tasks_from_source
from skyfleet.envs.tau.v1_tasks import tau_bench_tasks
from skyfleet.envs.users.user import UserFailedError
from skyfleet.errors import ConfigError, EnvError
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.from_objects import as_task
from skyfleet.tasks.task import Task

LIMITS = Limits(max_turns=10, max_input_length=0, trajectory_timeout_seconds=30)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tau_bench_checkout(tmp_path, monkeypatch) as folder:
        yield folder


def factory(*overrides: str) -> Any:
    return env_factory(load_config("", ["environment.env_class=tau_bench", *overrides]))


async def opened(task: Task, *overrides: str) -> Env:
    env: Env = await factory(*overrides)(task)
    await env.reset()
    return env


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(id=f"call_{name}", name=name, arguments=arguments)


def says(text: str = "", *calls: ToolCall) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls)


async def success(env: Any) -> bool:
    return bool((await env.grade()).success)


async def test_references_pass_and_doing_nothing_passes_where_nothing_is_asked(
    checkout: Path,
) -> None:
    tasks = tau_bench_tasks("retail")
    played = [await run_episode(task, factory(), oracle_policy, LIMITS) for task in tasks]
    assert [(one.failure, one.reward) for one in played] == [(None, 1.0)] * 3
    idle = [await run_episode(task, factory(), null_policy, LIMITS) for task in tasks]
    assert [one.reward for one in idle] == [0.0, 0.0, 1.0]


def test_a_task_is_a_row_of_the_recipe_with_a_reference(checkout: Path) -> None:
    cancel, total, talk = tau_tasks_from_source("tau_bench:retail?split=test")
    assert (cancel.key, cancel.env_key, cancel.env_class) == (
        "tau_bench-retail-test-0",
        "retail",
        "tau_bench",
    )
    assert cancel.prompt == "You are Ann. Cancel order 1."
    assert [one.name for one in cancel.solution] == ["get_order", "cancel_order"]
    assert [(one.name, one.arguments) for one in total.solution[1:]] == [
        ("respond", {"content": "1200"})
    ]
    assert [one.name for one in talk.solution] == ["transfer_to_human_agents"]


async def test_the_agent_sees_the_policy_the_tools_and_the_users_first_message(
    checkout: Path,
) -> None:
    (task, *_) = tau_bench_tasks("retail")
    observation = await (await factory()(task)).reset()
    assert [(one.role, one.text) for one in observation.messages] == [
        ("system", "Be polite."),
        ("user", "You are Ann. Cancel order 1."),
    ]
    assert [tool.name for tool in observation.tools] == [
        "get_order",
        "cancel_order",
        "calculate",
        "transfer_to_human_agents",
    ]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (call("get_order", order_id="1"), "pending"),
        (call("get_order", order_id="9"), "Error: '9'"),
        (
            call("get_order"),
            "Error: get_order() missing 1 required positional argument: 'order_id'",
        ),
        (call("cancel_order", order_id="2"), "Error: order is not pending"),
        (call("fly"), "Unknown action fly"),
    ],
)
async def test_what_a_tool_returns_or_raises_is_the_packages_text(
    checkout: Path, made: ToolCall, text: str
) -> None:
    step = await (await opened(tau_bench_tasks("retail")[0])).step(says("", made))
    assert [one.text for one in step.messages] == [text]
    assert [one.is_error for one in step.messages] == [text != "pending"]
    assert not step.done


async def test_only_the_first_call_of_a_message_is_made(checkout: Path) -> None:
    env = await opened(tau_bench_tasks("retail")[0])
    cancel = call("cancel_order", order_id="1")
    step = await env.step(says("I do both.", call("get_order", order_id="1"), cancel))
    assert [one.text for one in step.messages] == ["pending", NOT_CALLED]
    await env.step(says(DONE))
    assert not await success(env)


async def test_an_expression_that_never_ends_is_not_evaluated(checkout: Path) -> None:
    env = await opened(tau_bench_tasks("retail")[0])
    for expression, text in (
        ("2 ** 10", "1024"),
        ("9**9**9**9", TOO_LARGE),
        ("3**99999", TOO_LARGE),
    ):
        step = await env.step(says("", call("calculate", expression=expression)))
        assert step.messages[0].text == text


async def test_emphasis_in_a_text_is_no_power(checkout: Path) -> None:
    env = await opened(tau_bench_tasks("retail")[0])
    summary = "**Issue**: order **1234567** is late"
    step = await env.step(says("", call("transfer_to_human_agents", summary=summary)))
    assert step.done
    assert not step.messages[0].is_error
    assert step.messages[0].text != TOO_LARGE


async def test_a_malformed_call_is_reported_and_its_text_is_not_sent(checkout: Path) -> None:
    env = await opened(tau_bench_tasks("retail")[1])
    step = await env.step(
        Message(role="assistant", content="1200", malformed_calls=('{"name": "get_',))
    )
    assert "not valid JSON" in step.messages[0].text
    await env.step(says(DONE))
    assert not await success(env)


async def test_required_outputs_count_in_messages_without_their_commas(checkout: Path) -> None:
    task = tau_bench_tasks("retail")[1]
    env = await opened(task)
    assert (await env.step(says("It is 1,200 dollars."))).done
    assert await success(env)
    env = await opened(task)
    await env.step(says("It is 1200 dollars.", call("get_order", order_id="1")))
    await env.step(says(DONE))
    assert not await success(env)


async def test_another_end_state_fails_and_says_why(checkout: Path) -> None:
    env: Any = await opened(tau_bench_tasks("retail")[1])
    await env.step(says("", call("cancel_order", order_id="1")))
    await env.step(says(DONE))
    grade = await env.grade()
    assert (grade.reward, grade.parts) == (0.0, {"database": 0.0, "outputs": 0.0})
    assert grade.explanation == ("the database is not the reference's; no message contains '1200'")


async def test_a_conversation_that_has_not_ended_earns_nothing(checkout: Path) -> None:
    task = tau_bench_tasks("retail")[2]
    env: Any = await opened(task)
    assert (await env.grade()).explanation == "the conversation has not ended"
    # A transfer ends it, and the user's word does.
    step = await env.step(says("", call("transfer_to_human_agents", summary="talk")))
    assert step.done
    assert await success(env)
    with pytest.raises(EnvError, match="step after done"):
        await env.step(says("Hello?"))


async def test_the_packages_own_user_answers_and_stops(checkout: Path) -> None:
    options = ("environment.tau_bench.package_user=llm", "environment.tau_bench.user_model=mia")
    task = tau_bench_tasks("retail")[2]
    env = await factory(*options)(task)
    observation = await env.reset()
    assert observation.messages[-1].text == "mia: You are Eve. You only talk."
    assert (await env.step(says("hi"))).messages[0].text == "you said hi"
    step = await env.step(says("", call("respond", content="bye")))
    assert (step.done, step.messages[0].role) == (True, "tool")
    assert await success(env)


async def test_a_user_that_fails_makes_the_grade_unknown(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env: Any = await opened(tau_bench_tasks("retail")[2], "environment.tau_bench.package_user=llm")
    monkeypatch.setitem(sys.modules, "litellm", None)
    assert (await env.step(says("fail"))).done
    with pytest.raises(UserFailedError, match=r"endpoint.*need litellm: pip install litellm"):
        await env.grade()


async def test_validation_finds_what_passes_without_doing_anything(checkout: Path) -> None:
    cancel, _, talk = tau_bench_tasks("retail")
    assert await replay(cancel, factory(), timeout_seconds=30) is None
    fault = await replay(talk, factory(), timeout_seconds=30)
    assert fault is not None
    assert fault[0] is Reason.VACUOUS


def row(**extra: object) -> Task:
    info = {"domain": "retail", "instruction": "You are Bob. You ask for the total.", **extra}
    actions = [{"name": "get_order", "kwargs": {"order_id": "9"}}]
    return as_task(
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            "env_class": "tau_bench",
            "data_source": "tau_bench",
            "reward_spec": {"ground_truth": info.pop("actions", actions)},
            "extra_info": info,
        }
    )


async def test_a_row_of_the_recipe_gets_the_outputs_it_lost(checkout: Path) -> None:
    env = await opened(row())
    await env.step(says(DONE))
    assert not await success(env)
    env = await opened(row())
    await env.step(says("It is 1200."))
    assert await success(env)


async def test_a_row_of_its_own_is_graded_by_its_own_actions(checkout: Path) -> None:
    cancel = {"name": "cancel_order", "kwargs": {"order_id": "1"}}
    task = row(instruction="You are new.", actions=[cancel])
    env = await opened(task)
    assert isinstance(env, ConversationEnv)
    await env.step(says("", call("cancel_order", order_id="1")))
    await env.step(says(DONE))
    assert await success(env)


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"domain": "doordash"}, "tau-bench has no domain 'doordash'; choose from retail, airline"),
        (
            {"actions": [{"name": "refund", "kwargs": {}}]},
            "its reference calls 'refund', which is no tool of tau-bench's retail; correct the row",
        ),
        ({"split": "test", "task_index": 0}, "task 0 of retail test has another instruction"),
        ({"split": "test", "task_index": 7}, "task 7 of retail test has another instruction"),
    ],
)
async def test_a_row_that_fits_no_domain_or_tool_is_one_sentence(
    checkout: Path, extra: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(EnvError, match=sentence):
        await opened(row(**extra))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("tau_bench:retial", "no domain 'retial'; choose from retail, airline"),
        ("tau_bench:airline?split=train", "airline has no split 'train'; choose from test"),
        ("tau_bench:retail?count=3", "'count' is unknown; write tau_bench:retail[?]split=test"),
    ],
)
def test_a_source_that_does_not_exist_is_one_sentence(
    checkout: Path, source: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tau_tasks_from_source(source)


@pytest.mark.parametrize("value", [None, "", "nowhere"])
def test_a_wrong_path_is_one_sentence(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("TAU_BENCH_PATH")
    else:
        monkeypatch.setenv("TAU_BENCH_PATH", value)
    with pytest.raises(ConfigError, match=r"TAU_BENCH_PATH.* clone sierra-research/tau-bench"):
        factory()


def test_missing_data_is_one_sentence(checkout: Path) -> None:
    (checkout / "tau_bench/envs/retail/data/orders.json").unlink()
    with pytest.raises(
        ConfigError, match=r"the data of retail cannot be loaded.*check the clone out again"
    ):
        tau_bench_tasks("retail")


def test_another_version_is_warned_of_and_declares_nothing(
    checkout: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tasks = tau_bench_tasks("retail")
    assert "is not the tested version of sierra-research/tau-bench" in caplog.text
    assert all("null_success" not in task.metadata for task in tasks)


def test_the_import_needs_no_litellm_and_leaves_no_stand_in(checkout: Path) -> None:
    had_litellm = "litellm" in sys.modules
    path = list(sys.path)
    tau_bench_tasks("airline")
    assert ("litellm" in sys.modules) is had_litellm
    assert sys.path == path


def test_sf_env_names_a_domain_with_its_tasks(checkout: Path) -> None:
    spec = sf.env("tau_bench", domain="retail")
    assert (spec.name, spec.tasks) == ("retail", "tau_bench:retail?split=train")
    report = sf.evaluate("oracle", env=spec)
    assert report.success_rate == 1.0
    assert sf.env("tau_bench", domain="airline").tasks is None
    with pytest.raises(ConfigError, match=r"domain='telecom'.*choose from retail, airline"):
        sf.env("tau_bench", domain="telecom")


async def test_validation_opens_a_row_by_its_own_class(checkout: Path) -> None:
    open_env = build_inspectable_factory(load_config())
    env = await open_env(tau_bench_tasks("retail")[0])
    assert isinstance(env, Inspectable)
    assert env.writing == {"cancel_order", "respond"}
    await env.reset()
    before = env.state()
    await env.step(says("", call("cancel_order", order_id="1")))
    assert before != env.state()
