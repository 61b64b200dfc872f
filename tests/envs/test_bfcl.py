"""BFCL's test cases are shown as its own handlers show them, and its own checkers decide."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.bfcl.env import BfclEnv, open_bfcl
from skyfleet.envs.bfcl.package import list_categories, load_bfcl, load_category
from skyfleet.envs.bfcl.tasks import bfcl_tasks, bfcl_tasks_from_source, choose_answer
from skyfleet.errors import ConfigError, EnvError
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.task import RecordedCall, Task

pytest.importorskip("bfcl_eval", reason="needs bfcl-eval: pip install --no-deps bfcl-eval")

LIMITS = Limits(max_turns=60, max_input_length=0, trajectory_timeout_seconds=30)
REFERENCES = {
    "simple_python": 400,
    "simple_java": 85,
    "simple_javascript": 50,
    "multiple": 200,
    "parallel": 200,
    "parallel_multiple": 198,
    "irrelevance": 240,
    "live_simple": 256,
    "live_multiple": 1050,
    "live_parallel": 16,
    "live_parallel_multiple": 24,
    "live_irrelevance": 884,
    "live_relevance": 16,
}
"""How many of a category's accepted answers our writer turns into calls that the checker accepts."""


async def answered(task: Task, *calls: RecordedCall, text: str = "") -> Any:
    env = await open_bfcl(task)
    await env.reset()
    made = tuple(
        ToolCall(id=str(i), name=call.name, arguments=call.arguments)
        for i, call in enumerate(calls)
    )
    assert (await env.step(Message(role="assistant", content=text, tool_calls=made))).done
    grade = await env.grade()
    await env.close()
    return grade


async def test_the_package_decides_on_a_single_call() -> None:
    (task,) = bfcl_tasks("simple_python", 1)
    (call,) = task.solution
    assert (call.name, dict(call.arguments)) == (
        "calculate_triangle_area",
        {"base": 10, "height": 5, "unit": "units"},
    )
    assert (await answered(task, call)).success
    wrong = RecordedCall(name=call.name, arguments={**call.arguments, "base": 11})
    assert (await answered(task, wrong)).explanation.startswith("value_error:others")
    assert not (await answered(task, call, call)).success
    assert not (await answered(task, text="It is 25.")).success


async def test_no_call_is_right_where_no_function_fits() -> None:
    (task,) = bfcl_tasks("irrelevance", 1)
    assert task.metadata["null_success"] is True
    assert (await answered(task, text="I cannot.")).success
    assert not (await answered(task, RecordedCall(name="determine_body_mass_index"))).success


async def test_tools_have_json_types_and_names_without_dots() -> None:
    task = bfcl_tasks("simple_python", 2)[1]
    observation = await (await open_bfcl(task)).reset()
    (tool,) = observation.tools
    assert tool.name == "math_factorial"
    assert tool.parameters["type"] == "object"
    assert tool.parameters["properties"]["number"]["type"] == "integer"
    assert tool.description.endswith("in Python 3 syntax.")


@pytest.mark.parametrize("category", ["multi_turn_base", "multi_turn_miss_func"])
async def test_the_first_conversations_pass_with_their_references(category: str) -> None:
    tasks = bfcl_tasks(category, 5)
    played = [await run_episode(task, open_bfcl, oracle_policy, LIMITS) for task in tasks]
    assert [(one.failure, one.reward) for one in played] == [(None, 1.0)] * 5
    idle = [await run_episode(task, open_bfcl, null_policy, LIMITS) for task in tasks]
    assert [one.reward for one in idle] == [0.0] * 5


async def test_a_missing_function_is_added_in_its_turn() -> None:
    (task,) = bfcl_tasks("multi_turn_miss_func", 1)
    env = await open_bfcl(task)
    assert "sort" not in [tool.name for tool in (await env.reset()).tools]
    reply = Message(role="assistant", content="Done.")
    steps = [await env.step(reply) for _ in range(5)]
    assert [step.opening is not None for step in steps] == [False, False, True, False, False]
    opening = steps[2].opening
    assert opening is not None
    assert "sort" in [tool.name for tool in opening.tools]
    assert opening.messages[-1].text == load_bfcl().more_functions_prompt
    # The prompt and three turns.
    assert [one.role for one in opening.messages] == ["user", "assistant"] * 3 + ["user"]
    assert [step.done for step in steps] == [False] * 4 + [True]


async def test_only_announced_functions_are_executed() -> None:
    (task,) = bfcl_tasks("multi_turn_base", 1)
    env = await open_bfcl(task)
    await env.reset()
    calls = (
        ToolCall(id="a", name="open", arguments={"file": "/etc/passwd"}),
        ToolCall(id="b", name="cd", arguments={"folder": "document"}),
    )
    step = await env.step(Message(role="assistant", tool_calls=calls))
    assert [one.text for one in step.messages] == [
        "Error during execution: name 'open' is not defined",
        '{"current_working_directory": "document"}',
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("cd", {"folder=open({!r}, 'w'),a": "b"}, "cd() got an unexpected keyword argument"),
        ("cd", {"a=open({!r}, 'w'),folder": "b"}, "cd() got an unexpected keyword argument"),
        ("cd", {"b": "c"}, "cd() got an unexpected keyword argument 'b'"),
        ("cd", {"folder": "'), open({!r}, 'w'), ('"}, ""),
        ("cd", {"folder": ['"]), open({!r}, "w"), (["']}, ""),
        # A name that begins with that of a function is no name of one, in the check as well.
        ("cd(open({!r}, 'w'))#", {}, 'name "cd(open('),
    ],
)
async def test_nothing_but_the_call_is_evaluated(
    name: str, arguments: dict[str, Any], error: str, tmp_path: Path
) -> None:
    opened = tmp_path / "opened"

    def aimed(value: Any) -> Any:
        if isinstance(value, list):
            return [aimed(one) for one in value]
        return value.replace("{!r}", repr(str(opened)))

    (task,) = bfcl_tasks("multi_turn_base", 1)
    env = await open_bfcl(task)
    await env.reset()
    call = ToolCall(
        id="a", name=aimed(name), arguments={aimed(k): aimed(v) for k, v in arguments.items()}
    )
    step = await env.step(Message(role="assistant", tool_calls=(call,)))
    assert f"Error during execution: {error}" in step.messages[0].text or not error
    while not step.done:
        step = await env.step(Message(role="assistant", content="Done."))
    assert not (await env.grade()).success
    await env.close()
    assert not opened.exists()


async def test_a_turn_of_too_many_messages_fails_and_nothing_is_left() -> None:
    (task,) = bfcl_tasks("multi_turn_base", 1)
    env: BfclEnv = await open_bfcl(task)
    await env.reset()
    call = ToolCall(id="a", name="ls", arguments={})
    steps = [await env.step(Message(role="assistant", tool_calls=(call,))) for _ in range(21)]
    assert [step.done for step in steps] == [False] * 20 + [True]
    assert (await env.grade()).reward == 0.0
    own = f"{env._instances}_"
    assert any(name.startswith(own) for name in vars(load_bfcl().turns))
    await env.close()
    assert not any(name.startswith(own) for name in vars(load_bfcl().turns))


def test_the_import_needs_no_client_and_leaves_no_folder() -> None:
    code = (
        "import sys, bfcl_eval; from pathlib import Path;"
        "from skyfleet.envs.bfcl.package import load_category; load_category('simple_python');"
        "print(sorted({'anthropic', 'boto3', 'cohere', 'qwen_agent'} & set(sys.modules)),"
        "(Path(bfcl_eval.__file__).parents[1] / 'result').exists())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert found.stdout.strip() == "[] False", found.stderr


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("bfcl:simpel", "bfcl has no category 'simpel' that runs here; choose from simple_python"),
        ("bfcl:memory_kv", "bfcl has no category 'memory_kv' that runs here"),
        ("bfcl:multiple?count=0", r"count='0' is unknown; write bfcl:simple_python\?count=100"),
        ("bfcl:multiple?split=test", "split='test' is unknown"),
    ],
)
def test_a_source_that_does_not_exist_is_one_sentence(source: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        bfcl_tasks_from_source(source)


async def test_a_test_of_another_version_is_one_sentence() -> None:
    metadata = {"category": "multiple", "test_id": "multiple_9999"}
    with pytest.raises(EnvError, match="'multiple_9999' is no test of bfcl's multiple"):
        await open_bfcl(Task(key="k", env_key="e", prompt="p", metadata=metadata))


@pytest.mark.exhaustive
async def test_the_checker_accepts_the_accepted_answers() -> None:
    passed: Counter[str] = Counter()
    for category in REFERENCES:
        for task in bfcl_tasks(category):
            calls = choose_answer(load_category(category)[task.metadata["test_id"]])
            if category == "live_relevance":
                calls = [RecordedCall(name="any_call")]
            passed[category] += (await answered(task, *calls)).success
    assert passed == REFERENCES


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("category", "n_passed"),
    [
        ("multi_turn_base", 200),
        ("multi_turn_miss_func", 200),
        ("multi_turn_miss_param", 200),
        # Two references have turns of more calls than messages are allowed.
        ("multi_turn_long_context", 198),
    ],
)
async def test_every_conversation_passes_with_its_reference(category: str, n_passed: int) -> None:
    limits = Limits(max_turns=100, max_input_length=0, trajectory_timeout_seconds=60)
    tasks = bfcl_tasks(category)
    played = [await run_episode(task, open_bfcl, oracle_policy, limits) for task in tasks]
    assert (len(played), sum(one.reward == 1.0 for one in played)) == (200, n_passed)


def test_categories_that_need_a_network_are_left_out() -> None:
    assert len(list_categories()) == len(REFERENCES) + 4
