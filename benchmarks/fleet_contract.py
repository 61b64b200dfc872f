"""Play the same trajectories through Fleet's public FleetTaskEnv and through our own client.

    SKYFLEET_OPENENV_FLEET=/path/to/OpenEnv/src python -m benchmarks.fleet_contract

Both talk to our Fleet-compatible server; prompts, tools, observations and rewards are compared turn
by turn. The variable names a checkout of fleet-ai/OpenEnv, and further folders with packages that
it imports (`pip install skyfleet[fleet]` has them), separated by colons.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import Any
from unittest.mock import patch

from skyfleet.analysis.formatting import table
from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.envs.agent_gateway import LOCAL_ACCESS, LoopbackServer
from skyfleet.envs.env import DONE, EnvFactory
from skyfleet.envs.fleet.env import fleet_factory
from skyfleet.envs.fleet.openenv_env import MODULE, OpenEnvFleetEnv, import_task_env
from skyfleet.envs.fleet.settings import FleetSettings
from skyfleet.envs.tool_turns import SUBMIT_NAME
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks
from skyfleet.worlds.fleet_server.server import build_fleet_app

PATH_VARIABLE = "SKYFLEET_OPENENV_FLEET"
KEY = "local-key"

ASPECTS = ("prompt", "tools", "observation", "done", "reward", "grade")

Script = Sequence[Message]
"""What the agent says, turn by turn."""


@contextmanager
def installed_task_env() -> Iterator[None]:
    """Find FleetTaskEnv and take out its waiting times, not its behaviour."""
    for folder in os.environ.get(PATH_VARIABLE, "").split(os.pathsep):
        # Last, so that what is installed here is preferred.
        if folder and folder not in sys.path:
            sys.path.append(folder)
    import_task_env()
    client, task_env = import_module(f"{MODULE}.client"), import_module(f"{MODULE}.task_env")
    with (
        patch.object(client, "FleetMCPTools", partial(client.FleetMCPTools, initial_wait=0)),
        patch.object(task_env, "_VERIFY_BACKOFF_S", 0.0),
    ):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What an agent saw and earned."""

    prompt: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    observations: list[tuple[Message, ...]]
    rewards: list[float | None]
    """Per turn, and the grade last; None: unknown."""
    done: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    aspect: str
    task_key: str
    script: str
    turn: int
    theirs: Any
    ours: Any

    @property
    def equal(self) -> bool:
        return bool(self.theirs == self.ours)


@asynccontextmanager
async def serve_fleet(app: Any) -> AsyncIterator[FleetSettings]:
    server = LoopbackServer(app, LOCAL_ACCESS)
    with patch.dict(os.environ, FLEET_BASE_URL=server.url):
        try:
            yield FleetSettings(api_key=KEY, first_wait_seconds=0.01)
        finally:
            await server.stop()


async def compare(
    settings: FleetSettings, task: Task, name: str, script: Script, expected: float | None
) -> list[Check]:
    """Play the script through both clients, each in an instance of its own.

    Both grades are compared with the expected one: two unknown grades are no agreement.
    """
    raw: list[Any] = []
    recording = partial(_record, import_task_env(), raw)

    async def open_theirs(task: Task) -> OpenEnvFleetEnv:
        return OpenEnvFleetEnv(recording, task, settings)

    theirs = await play(open_theirs, task, script)
    ours = await play(fleet_factory(settings), task, script)
    check = partial(Check, task_key=task.key, script=name)
    first, *steps = raw
    raw_rewards = [reward for _, reward, _, _ in steps]
    checks = [
        check(aspect="prompt", turn=0, theirs=first["prompt"], ours=ours.prompt[-1].text),
        check(aspect="prompt", turn=0, theirs=theirs.prompt, ours=ours.prompt),
        check(
            aspect="tools",
            turn=0,
            theirs=_comparable(map(_read, first["tools"])),
            ours=_comparable(ours.tools),
        ),
        check(aspect="grade", turn=len(script), theirs=raw_rewards[-1], ours=expected),
        check(aspect="grade", turn=len(script), theirs=expected, ours=ours.rewards[-1]),
        check(aspect="reward", turn=0, theirs=any(raw_rewards[:-1]), ours=any(ours.rewards[:-1])),
    ]
    for turn, pair in enumerate(zip(theirs.observations, ours.observations, strict=True), 1):
        checks.append(check(aspect="observation", turn=turn, theirs=pair[0], ours=pair[1]))
    for aspect in ("rewards", "done"):
        of_turn = zip(getattr(theirs, aspect), getattr(ours, aspect), strict=True)
        for turn, pair in enumerate(of_turn, 1):
            checks.append(
                check(aspect=aspect.removesuffix("s"), turn=turn, theirs=pair[0], ours=pair[1])
            )
    return checks


async def play(open_env: EnvFactory, task: Task, script: Script) -> Played:
    env: Any = await open_env(task)
    try:
        opening = await env.reset()
        steps = []
        for action in script:
            steps.append(await env.step(action))
            if steps[-1].done:
                break
        try:
            grade = (await env.grade()).reward
        except VerifierError:
            grade = None
    finally:
        await env.close()
    return Played(
        prompt=opening.messages,
        tools=opening.tools,
        observations=[step.messages for step in steps],
        rewards=[*(step.reward for step in steps), grade],
        done=[step.done for step in steps],
    )


def _record(task_env: Any, log: list[Any], *args: Any, **options: Any) -> Any:
    """Make a FleetTaskEnv whose answers are logged."""
    env = task_env(*args, **options)
    reset_async, step_async = env.reset_async, env.step_async

    async def reset() -> Any:
        log.append(await reset_async())
        return log[-1]

    async def step(action: Mapping[str, Any]) -> Any:
        log.append(await step_async(action))
        return log[-1]

    env.reset_async, env.step_async = reset, step
    return env


def _read(tool: Mapping[str, Any]) -> ToolSpec:
    function = tool["function"]
    return ToolSpec(
        name=function["name"],
        description=function["description"] or "",
        parameters=function["parameters"],
    )


def _comparable(tools: Any) -> list[ToolSpec]:
    """submit_final_answer is described in other words."""
    return [
        replace(tool, description="", parameters={"names": [*tool.parameters["properties"]]})
        if tool.name == SUBMIT_NAME
        else tool
        for tool in tools
    ]


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id="c1", name=name, arguments=arguments)


def say(text: str = "", *calls: ToolCall, malformed: tuple[str, ...] = ()) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls, malformed_calls=malformed)


def make_scripts(task: Task) -> dict[str, tuple[Script, float]]:
    """Ways to play a task, each with its grade."""
    calls = [call(one.name, **one.arguments) for one in task.solution]
    turns = [say("", one) for one in calls]
    return {
        "reference": ([*turns, say(DONE)], 1.0),
        "reference in one turn": ([say(DONE, *calls)], 1.0),
        "half": ([*turns[: len(turns) // 2], say(DONE)], 0.0),
        "cut short": (turns[: len(turns) // 2], 0.0),
        "nothing": ([say(DONE)], 0.0),
        "mistakes": (make_mistakes(calls), 1.0 if len(calls) < 3 else 0.0),
    }


def make_mistakes(calls: Sequence[ToolCall]) -> Script:
    """Every mistake that the environment reports to the agent, then the first two calls of the reference."""
    return [
        say("", call("no_such_tool")),
        say("", call(calls[0].name, nmber=1)),
        say("I think about it."),
        say("", malformed=('{"name": ',)),
        say("", call(SUBMIT_NAME, answer=7)),
        say("", *calls[:2]),
        say(f"It is done. {DONE}"),
    ]


ODD_RESULTS: dict[str, Any] = {
    "empty list, structured": {"content": [], "structuredContent": {"result": []}},
    "empty list": {"content": [{"type": "text", "text": "[]"}]},
    "zero": {"content": [{"type": "text", "text": "0"}]},
    "false": {"content": [{"type": "text", "text": "false"}]},
    "null": {"content": [{"type": "text", "text": "null"}]},
    "empty text": {"content": [{"type": "text", "text": ""}]},
    "object": {"content": [{"type": "text", "text": '{"id": 3, "name": "Zoë"}'}]},
    "error": {"content": [{"type": "text", "text": "no row 3"}], "isError": True},
    "error in an object": {"content": [{"type": "text", "text": '{"error": "no row 3"}'}]},
    "failed status": {"content": [{"type": "text", "text": '{"status": "failed", "id": 3}'}]},
    "no error": {"content": [{"type": "text", "text": '{"error": null, "id": 3}'}]},
    "image": {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/jpeg"}]},
    "image in JSON": {
        "content": [{"type": "text", "text": '{"base64_image": "data:image/png;base64,AAAA"}'}]
    },
}
"""Results that the worlds' tools do not return, by a name that a script calls them with."""


VERIFIERS: dict[str, tuple[str, float | None]] = {
    "async verifier": (
        "async def verify(env):\n"
        "    await env.instance.load()\n"
        "    rows = await env.db('current').table('issues').all()\n"
        "    return 1.0 if rows else 0.0\n",
        1.0,
    ),
    "verifier of the conversation": (
        "def verify(env, final_answer=None, conversation=None):\n"
        "    turns = json.loads(conversation)\n"
        "    roles = [turn['role'] for turn in turns]\n"
        "    return 1 if roles[:3] == ['system', 'user', 'assistant'] else 0\n",
        1.0,
    ),
    "verifier that returns nothing": ("def verify(env):\n    assert env\n", 1.0),
    "partial result": ("def verify(env):\n    return 0.25\n", 0.25),
    "crashing verifier": (
        "def verify(env):\n    return env.db('current').table('x').all()\n",
        None,
    ),
    "judge without an answer": (
        "def verify(env):\n    print('JUDGE ERROR: 529')\n    return 0\n",
        None,
    ),
}
"""Verifiers in other forms than the worlds' own, with the grade that both clients must return."""


GENERATED_TOOL = {
    "name": "generated",
    "description": None,
    "inputSchema": {
        "title": "generatedArguments",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "title": {"title": "Title", "type": "string", "description": "A property's name."},
            "page": {
                "anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}],
                "default": None,
                "title": "Page",
            },
            "point": {
                "type": "array",
                "title": "Point",
                "prefixItems": [{"type": "number"}, {"type": "number"}],
                "minItems": 2,
            },
            "labels": {
                "type": "array",
                "title": "Labels",
                "items": {"title": "Label", "enum": ["bug", "idea"], "default": "bug"},
                "default": [],
            },
            "where": {
                "type": "object",
                "title": "Where",
                "properties": {"city": {"type": "string", "title": "City", "default": ""}},
            },
        },
        "required": ["title"],
    },
}
"""A tool whose schema was generated from a signature; the worlds' own schemas have nothing to drop."""


class OddResults:
    """Answers a call with the argument `odd` as ODD_RESULTS says, and lists GENERATED_TOOL at the
    second endpoint; all else goes to the app."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        body = await Request(scope, receive).body()
        message = json.loads(body) if body.startswith(b"{") else {}
        odd = ((message.get("params") or {}).get("arguments") or {}).get("odd")
        at_second = scope["path"].endswith("/api/v1/mcp")
        if odd is not None:
            result = ODD_RESULTS[odd]
        elif at_second and message.get("method") == "tools/list":
            result = {"tools": [GENERATED_TOOL]}
        else:
            await self._app(scope, partial(_receive, body), send)
            return
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        await JSONResponse(answer)(scope, receive, send)


async def _receive(body: bytes) -> Any:
    return {"type": "http.request", "body": body, "more_body": False}


async def compare_worlds(tasks_per_world: int) -> tuple[list[Check], str]:
    """Return every check, and how many instances were created and deleted."""
    checks: list[Check] = []
    tasks = [
        task
        for world in WORLD_NAMES
        for task in generate_world_tasks(world, split="all", count=tasks_per_world, seed=11)
    ]
    app = build_fleet_app(tasks, api_key=KEY)
    async with serve_fleet(OddResults(app)) as settings:
        for task in tasks:
            checks += await compare_task(settings, task)
        checks += await compare_odd_results(settings)
        checks += await compare_verifiers(settings)
    instances = app.state.instances
    return checks, f"{instances.created} instances created, {instances.deleted} deleted"


async def compare_task(settings: FleetSettings, task: Task) -> list[Check]:
    checks: list[Check] = []
    for name, (script, expected) in make_scripts(task).items():
        checks += await compare(settings, task, name, script, expected)
    return checks


async def compare_odd_results(settings: FleetSettings) -> list[Check]:
    task = generate_world_tasks("github", split="all", count=1)[0]
    tools = cycle(["list_issues", "generated"])
    script = [say("", call(tool, odd=odd)) for tool, odd in zip(tools, ODD_RESULTS, strict=False)]
    return await compare(settings, task, "odd results", [*script, say(DONE)], 0.0)


async def compare_verifiers(settings: FleetSettings) -> list[Check]:
    checks: list[Check] = []
    (task,) = generate_world_tasks("github", split="all", count=1)
    script = [say("", call("list_issues")), say(DONE)]
    for name, (code, expected) in VERIFIERS.items():
        changed = task.model_copy(update={"verifier_code": code})
        checks += await compare(settings, changed, name, script, expected)
    return checks


def main() -> None:
    with installed_task_env():
        checks, instances = asyncio.run(compare_worlds(int((sys.argv[1:] or ["2"])[0])))
    total, equal = (
        Counter((check.script, check.aspect) for check in checks if check.equal or every)
        for every in (True, False)
    )
    scripts = list(dict.fromkeys(check.script for check in checks))
    rows = [
        (script, *(f"{equal[script, one]} of {total[script, one]}" for one in ASPECTS))
        for script in scripts
    ]
    print(table(("trajectory", *ASPECTS), rows))
    print(instances)
    for check in checks:
        if not check.equal:
            print(f"{check}")


if __name__ == "__main__":
    main()
