"""tau2 runs from a checkout: tools of both sides, and every basis of its reward but the judge's."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.tau_checkouts import forgetting_packages, tau2_checkout

from skyfleet.chat.message import Message, ToolCall
from skyfleet.config.loading import load_config
from skyfleet.envs.env import DONE
from skyfleet.envs.registry import env_factory
from skyfleet.envs.tau import v2_data
from skyfleet.envs.tau.sources import tau_tasks_from_source
from skyfleet.envs.tau.v2_data import find_data_folder
from skyfleet.envs.tau.v2_package import load_package
from skyfleet.envs.tau.v2_tasks import tau2_tasks
from skyfleet.envs.tau.v2_users import find_requested_calls, write_request
from skyfleet.envs.users.user import UserFailedError
from skyfleet.errors import ConfigError, EnvError
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.task import Task

LIMITS = Limits(max_turns=10, max_input_length=0, trajectory_timeout_seconds=30)
PACKAGE_USER = "environment.tau_bench.package_user=llm"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Without an inspect-evals that may be installed.
    monkeypatch.setattr(v2_data, "find_spec", lambda name: None)
    with tau2_checkout(tmp_path, monkeypatch) as folder:
        yield folder


def factory(*overrides: str) -> Any:
    return env_factory(load_config("", ["environment.env_class=tau2", *overrides]))


def tasks() -> dict[str, Task]:
    return {task.metadata["extra_info"]["task_id"]: task for task in tau2_tasks("mock")}


async def opened(name: str, *overrides: str) -> Any:
    env = await factory(*overrides)(tasks()[name])
    await env.reset()
    return env


def says(text: str = "", *calls: ToolCall) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls)


CANCEL = ToolCall(id="c", name="cancel_order", arguments={"order_id": "1"})


async def test_references_pass_and_doing_nothing_does_not(checkout: Path) -> None:
    names = ["cancel", "plug", "judged"]
    rows = tasks()
    played = [await run_episode(rows[name], factory(), oracle_policy, LIMITS) for name in names]
    assert [(one.failure, one.reward) for one in played] == [(None, 1.0)] * 3
    idle = [await run_episode(task, factory(), null_policy, LIMITS) for task in rows.values()]
    assert [(one.failure, one.reward) for one in idle] == [(None, 0.0)] * 4


async def test_the_agent_starts_with_the_policy_and_its_own_greeting(checkout: Path) -> None:
    observation = await (await factory()(tasks()["cancel"])).reset()
    assert [(one.role, one.text) for one in observation.messages] == [
        ("system", "Help. Be polite."),
        ("assistant", "Hi!"),
        ("user", "You want cancel."),
    ]
    # The user's tools are not the agent's.
    assert [tool.name for tool in observation.tools] == ["get_order", "cancel_order"]


async def test_the_database_and_the_required_information_both_count(checkout: Path) -> None:
    env = await opened("cancel")
    await env.step(says("", CANCEL))
    await env.step(says(DONE))
    assert (await env.grade()).parts == {"DB": 1.0, "COMMUNICATE": 0.0}
    env = await opened("cancel")
    await env.step(says("", CANCEL))
    await env.step(says("That is 10.50."))
    grade = await env.grade()
    assert (grade.reward, grade.parts) == (1.0, {"DB": 1.0, "COMMUNICATE": 1.0})


async def test_a_user_uses_its_tools_when_it_is_asked_to(checkout: Path) -> None:
    env = await opened("plug")
    step = await env.step(says("Please run plug_in() for me."))
    assert (step.messages[0].text, step.done) == ("plug_in: plugged in", False)
    await env.step(says(DONE))
    assert (await env.grade()).parts == {"ENV_ASSERTION": 1.0, "ACTION": 1.0}


async def test_the_agent_cannot_call_the_users_tools(checkout: Path) -> None:
    env = await opened("plug")
    step = await env.step(says("", ToolCall(id="p", name="plug_in", arguments={})))
    assert step.messages[0].is_error
    await env.step(says(DONE))
    assert (await env.grade()).reward == 0.0


async def test_a_task_that_needs_a_judge_is_graded_by_its_database_and_says_so(
    checkout: Path,
) -> None:
    assert {name: task.metadata.get("graded") for name, task in tasks().items()} == {
        "cancel": None,
        "plug": None,
        "judged": "database only",
        "gone": None,
    }
    env = await opened("judged")
    await env.step(says("", CANCEL))
    await env.step(says(DONE))
    grade = await env.grade()
    assert (grade.reward, grade.parts) == (1.0, {"DB": 1.0})
    assert grade.explanation == "natural-language assertions were not judged: database only"


async def test_an_assertion_about_a_record_that_is_missing_fails(checkout: Path) -> None:
    env = await opened("gone")
    await env.step(says(DONE))
    assert (await env.grade()).explanation == "not fulfilled: ENV_ASSERTION"


async def test_the_packages_own_user_calls_its_tools_and_stops(checkout: Path) -> None:
    env = await opened("plug", PACKAGE_USER)
    step = await env.step(says("plug it in"))
    assert step.messages[0].text == "openai/gpt-4o heard plugged in"
    assert (await env.step(says("bye"))).done
    assert (await env.grade()).reward == 1.0


async def test_the_packages_own_user_may_fail(checkout: Path) -> None:
    env = await opened("plug", PACKAGE_USER)
    assert (await env.step(says("fail"))).done
    with pytest.raises(UserFailedError, match="RuntimeError: the model is gone"):
        await env.grade()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Run plug_in().", [("plug_in", {})]),
        ('set_mode({"mode": "4g (LTE)"}) and plug_in( )', [("set_mode", {"mode": "4g (LTE)"})]),
        ("plug_in", []),
        ("plug_in({)", []),
        ('plug_in({"a": 1}', []),
        ("transfer(1)", []),
    ],
)
def test_requests_to_the_user_are_found_in_a_message(text: str, found: list[Any]) -> None:
    calls = list(find_requested_calls(text, ("plug_in", "set_mode")))
    assert [call for call in calls if call in found] == found
    assert not found or calls[0] == found[0]


def test_a_written_request_is_found_again() -> None:
    for arguments in ({}, {"mode": "a) b"}):
        text = f"Please run {write_request('set_mode', arguments)}."
        assert list(find_requested_calls(text, ["set_mode"])) == [("set_mode", arguments)]


def test_the_chemistry_package_of_the_same_name_is_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = checkout / "src" / "tau2" / "environment" / "environment.py"
    other.unlink()
    with pytest.raises(ConfigError, match=r"holds no src/tau2/environment/environment.py; clone"):
        factory()


def test_a_package_of_that_name_that_is_already_imported_is_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forgetting_packages():
        wrong = checkout / "wrong" / "tau2"
        wrong.mkdir(parents=True)
        (wrong / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(wrong.parent))
        assert import_module("tau2").__file__ == str(wrong / "__init__.py")
        with pytest.raises(ConfigError, match="another package named tau2 is already imported"):
            load_package()
    assert "tau2" not in sys.modules


def test_files_that_a_checkout_lacks_come_from_inspect_evals(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domains = checkout / "site" / "inspect_evals" / "tau2" / "data" / "domains"
    (domains / "airline").mkdir(parents=True)
    (domains / "mock").mkdir()
    (domains / "airline" / "db.json.gz").write_bytes(gzip.compress(b'{"flights": {}}'))
    (domains / "airline" / "policy.txt").write_text("Fly.")
    (domains / "mock" / "db.json").write_text("theirs")
    (checkout / "data/tau2/domains/mock/db.json").write_text("ours")
    location = SimpleNamespace(submodule_search_locations=[str(checkout / "site/inspect_evals")])
    monkeypatch.setattr(v2_data, "find_spec", lambda name: location)
    folder = find_data_folder(checkout) / "tau2" / "domains"
    assert (folder / "airline" / "db.json").read_text() == '{"flights": {}}'
    assert (folder / "airline" / "policy.md").read_text() == "Fly."
    assert (folder / "mock" / "db.json").read_text() == "ours"


def test_a_complete_folder_is_used_as_it_is(checkout: Path) -> None:
    assert find_data_folder(checkout) == checkout / "data"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("tau2:retial", "tau2 has no domain 'retial'; choose from airline, retail, telecom, mock"),
        ("tau2:mock?split=train", "mock has no split 'train'; choose from base"),
        ("tau2:airline", "airline has no db.json in TAU2_DATA_DIR=.*inspect-evals"),
    ],
)
def test_a_domain_without_data_or_name_is_one_sentence(
    checkout: Path, source: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tau_tasks_from_source(source)


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"domain": "news"}, "extra_info.domain='news' is no domain of tau2"),
        (
            {"domain": "mock", "task_id": "old"},
            "tau2's mock has no task 'old'; list the tasks again",
        ),
    ],
)
async def test_a_row_of_no_task_is_one_sentence(
    checkout: Path, extra: dict[str, Any], sentence: str
) -> None:
    task = Task(key="k", env_key="e", prompt="p", metadata={"extra_info": extra})
    with pytest.raises(EnvError, match=sentence):
        await factory()(task)
