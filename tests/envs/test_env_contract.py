"""Every environment keeps these rules.

To check an environment, write an async context manager that takes a folder to work in and yields
a `Case`, and add it to `KINDS` in one line. Servers, databases and keys live in the manager.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import psutil
import pytest
from examples.add_an_env.env import open_env as open_safe
from jsonschema import Draft202012Validator
from tests.fakes.gym_tasks import CASES, gym_case
from tests.fakes.page_example import module_on, task_on
from tests.fakes.serving import serving

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.agentdojo.env import open_agentdojo
from skyfleet.envs.agentdojo.tasks import agentdojo_tasks
from skyfleet.envs.context_env import with_context_tools
from skyfleet.envs.env import DONE, Env, EnvFactory, Step, close_env, grade_env
from skyfleet.envs.fleet.env import fleet_factory
from skyfleet.envs.fleet.settings import FleetSettings
from skyfleet.envs.mcp.client import MCPSettings, mcp_factory
from skyfleet.envs.mcp.grading import by_url, by_verifier
from skyfleet.envs.mcp.server import mcp_app
from skyfleet.envs.openenv.client import openenv_factory
from skyfleet.envs.openenv.server import openenv_app
from skyfleet.envs.openenv.session import OpenEnvSettings
from skyfleet.envs.skyrl_gym import skyrl_gym_factory
from skyfleet.errors import EnvError, VerifierError
from skyfleet.tasks.loading import load_tasks
from skyfleet.tasks.task import Grade, Task
from skyfleet.worlds.catalog import generate_world_tasks, open_world
from skyfleet.worlds.fleet_server.server import build_fleet_app


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    open_env: EnvFactory
    task: Task
    solution: tuple[Message, ...]
    """The agent's messages, turn by turn, until it is done."""
    grade_ends: bool = False
    """Some protocols reveal the grade only by ending the episode."""

    async def opened(self) -> Env:
        env = await self.open_env(self.task)
        await env.reset()
        return env


ROOT = Path(__file__).parents[2]
Kind = Callable[[Path], AbstractAsyncContextManager[Case]]


def says(text: str) -> Message:
    return Message(role="assistant", content=text)


def calls(name: str, **arguments: object) -> Message:
    call = ToolCall(id="call_0", name=name, arguments=arguments)
    return Message(role="assistant", tool_calls=(call,))


def solution_of(task: Task) -> tuple[Message, ...]:
    """The reference calls, one per turn; the last ends the episode, or `<done>` does."""
    sampled_text = [calls(call.name, **call.arguments) for call in task.solution]
    answered = task.solution[-1].name == "submit_final_answer"
    return tuple(sampled_text) if answered else (*sampled_text, says(DONE))


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[Case]:
    task = world_task()
    yield Case(open_env=open_world, task=task, solution=solution_of(task))


@asynccontextmanager
async def context_tools(folder: Path) -> AsyncIterator[Case]:
    task = world_task()
    open_env = with_context_tools(open_world, max_output_chars=100)
    yield Case(open_env=open_env, task=task, solution=solution_of(task))


@asynccontextmanager
async def agentdojo(key: str, folder: Path) -> AsyncIterator[Case]:
    task = dojo_tasks()[key]
    yield Case(open_env=open_agentdojo, task=task, solution=solution_of(task))


@cache
def dojo_tasks() -> dict[str, Task]:
    return {task.key: task for task in agentdojo_tasks()}


@asynccontextmanager
async def skyrl_gym(env_id: str, folder: Path) -> AsyncIterator[Case]:
    with gym_case(env_id, folder) as (settings, task):
        solution = tuple(map(says, CASES[env_id].says))
        yield Case(open_env=skyrl_gym_factory(settings), task=task, solution=solution)


@asynccontextmanager
async def the_page(folder: Path) -> AsyncIterator[Case]:
    page = "bring_your_own_environment.md"
    task = task_on(page)
    yield Case(open_env=module_on(page).open_button, task=task, solution=solution_of(task))


@asynccontextmanager
async def safe(folder: Path) -> AsyncIterator[Case]:
    task = load_tasks(ROOT / "examples" / "add_an_env" / "tasks.jsonl")[0]
    sampled_text = tuple(calls(call.name, **call.arguments) for call in task.solution)
    yield Case(open_env=open_safe, task=task, solution=sampled_text)


def world_task() -> Task:
    return generate_world_tasks("github", split="train", count=1)[0]


@asynccontextmanager
async def openenv(folder: Path) -> AsyncIterator[Case]:
    task = world_task()
    async with serving(openenv_app([task], open_world, max_sessions=64)) as url:
        open_env = openenv_factory(OpenEnvSettings(base_url=url))
        yield Case(open_env=open_env, task=task, solution=solution_of(task), grade_ends=True)


@asynccontextmanager
async def mcp(folder: Path) -> AsyncIterator[Case]:
    task = world_task()
    async with serving(mcp_app([task], open_world)) as url:
        settings = MCPSettings(
            url=f"{url}/{{task_key}}/mcp", grade=by_url(f"{url}/{{task_key}}/grade")
        )
        open_env = mcp_factory(settings)
        yield Case(open_env=open_env, task=task, solution=solution_of(task), grade_ends=True)


@asynccontextmanager
async def mcp_stdio(folder: Path) -> AsyncIterator[Case]:
    task = world_task()
    seed = (task.data_key or "").removeprefix("seed-")
    settings = MCPSettings(
        command=(sys.executable, "-m", "tests.fakes.mcp_world", "github", seed),
        environment={"PYTHONPATH": f"{ROOT}:{ROOT}/src"},
        grade=by_verifier(seed_uri="state://seed", current_uri="state://current"),
    )
    yield Case(open_env=mcp_factory(settings), task=task, solution=solution_of(task))


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Case]:
    task = world_task()
    async with serving(build_fleet_app([task], api_key="key")) as url:
        open_env = fleet_factory(FleetSettings(api_key="key", base_url=url))
        yield Case(open_env=open_env, task=task, solution=solution_of(task))


# Of each suite one that changes something.
DOJO_KEYS = (
    "agentdojo-workspace-user_task_7",
    "agentdojo-travel-user_task_0",
    "agentdojo-banking-user_task_0",
    "agentdojo-slack-user_task_1",
)

KINDS: dict[str, Kind] = {
    "world": world,
    "context_tools": context_tools,
    "the_page": the_page,
    "safe": safe,
    "openenv": openenv,
    "mcp": mcp,
    "mcp_stdio": mcp_stdio,
    "fleet": fleet,
    **{key: partial(agentdojo, key) for key in DOJO_KEYS},
    **{f"skyrl_gym-{env_id}": partial(skyrl_gym, env_id) for env_id in CASES},
}

pytestmark = [
    # lcb forks, which Python 3.12 warns of where there are threads.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.parametrize(
        "kind",
        [
            # It starts a Python process per episode.
            pytest.param(kind, id=name, marks=pytest.mark.slow if name == "mcp_stdio" else ())
            for name, kind in KINDS.items()
        ],
    ),
]


@pytest.fixture
async def case(kind: Kind, tmp_path: Path) -> AsyncIterator[Case]:
    async with kind(tmp_path) as case:
        yield case


async def test_reset_returns_text_and_tools_with_unique_names(
    case: Case,
) -> None:
    env = await case.open_env(case.task)
    observation = await env.reset()
    assert any(message.text for message in observation.messages)
    names = [tool.name for tool in observation.tools]
    assert len(set(names)) == len(names)
    for tool in observation.tools:
        Draft202012Validator.check_schema(tool.parameters)
        assert tool.parameters["type"] == "object"
    await close_env(env)


async def test_its_solution_ends_it_and_passes_and_doing_nothing_does_not(case: Case) -> None:
    idle = await case.opened()
    assert not passes(await graded(idle))
    await close_env(idle)
    env = await case.opened()
    *before, last = [await env.step(action) for action in case.solution]
    assert [step.done for step in before] == [False] * len(before)
    assert last.done
    assert passes(await graded(env))
    await close_env(env)


async def test_a_step_before_reset_or_after_close_is_an_env_error(case: Case) -> None:
    env = await case.open_env(case.task)
    with pytest.raises(EnvError):
        await env.step(case.solution[0])
    await env.reset()
    await close_env(env)
    with pytest.raises(EnvError):
        await env.step(case.solution[0])


@pytest.mark.parametrize(
    "action",
    [
        says(""),
        says("Let me think."),
        Message(role="assistant", malformed_calls=('<tool_call>{"name": ',)),
        calls("no_such_tool", path="\N{SNOWMAN}" * 100),
        calls("", nested={"list": [None, 1e300]}),
    ],
    ids=["empty", "only words", "malformed", "unknown tool", "no name"],
)
async def test_every_action_gets_an_answer(case: Case, action: Message) -> None:
    env = await case.opened()
    assert answered(await env.step(action))
    await close_env(env)


async def test_wrong_arguments_are_answered_by_every_tool(case: Case) -> None:
    env = await case.open_env(case.task)
    for tool in (await env.reset()).tools:
        step = await env.step(calls(tool.name, no_such_argument=[{}]))
        assert answered(step)
        if step.done:
            await close_env(env)
            env = await case.opened()
    await close_env(env)


async def test_it_can_be_graded_at_any_point_and_grading_changes_nothing(case: Case) -> None:
    for turns in range(len(case.solution)):
        env = await case.opened()
        for action in case.solution[:turns]:
            await env.step(action)
        first = await graded(env)
        assert await graded(env) == first
        if not case.grade_ends:
            *_, last = [await env.step(action) for action in case.solution[turns:]]
            assert last.done
            assert passes(await graded(env))
        await close_env(env)


async def test_it_may_be_closed_twice_and_unopened(case: Case) -> None:
    for env in (await case.opened(), await case.open_env(case.task)):
        await close_env(env)
        await close_env(env)


async def test_two_envs_of_one_task_share_nothing(case: Case) -> None:
    one, other = await case.open_env(case.task), await case.open_env(case.task)
    assert await one.reset() == await other.reset()
    untouched = await graded(other)
    assert not passes(untouched)
    for action in case.solution:
        await one.step(action)
    assert passes(await graded(one))
    assert await graded(other) == untouched
    later = await case.opened()
    assert await graded(later) == untouched
    for env in (one, other, later):
        await close_env(env)


async def test_close_releases_tasks_threads_and_files(case: Case) -> None:
    await play_and_close(case)  # what is made once for all episodes is made here
    before = held()
    for _ in range(2):
        await play_and_close(case)
    for _ in range(100):  # threads may still be ending
        if not (more := held() - before):
            break
        await asyncio.sleep(0.01)
    assert not more


async def play_and_close(case: Case) -> None:
    """One episode to its end, and one that is left in the middle."""
    for turns in (len(case.solution), len(case.solution) // 2):
        env = await case.opened()
        for action in case.solution[:turns]:
            await env.step(action)
        await graded(env)
        await close_env(env)


def answered(step: Step) -> bool:
    return step.done or bool(step.messages)


async def graded(env: Env) -> Grade | str | None:
    try:
        return await grade_env(env, ())
    except VerifierError as error:
        return str(error)


def passes(grade: Grade | str | None) -> bool:
    return isinstance(grade, Grade) and grade.success


def held() -> Counter[str]:
    # The loop's own pool of threads belongs to the loop and ends with it.
    threads = [one for one in threading.enumerate() if not one.name.startswith("asyncio_")]
    return Counter(
        {
            "tasks": len(asyncio.all_tasks()),
            "threads": len(threads),
            "child processes": len(psutil.Process().children(recursive=True)),
            "file descriptors": len(os.listdir("/proc/self/fd")),
        }
    )
