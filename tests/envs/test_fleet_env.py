"""The fleet_task adapter against our own Fleet-compatible server."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from datetime import date
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.fakes.faulty_fleet import (
    LIMITS,
    PATIENT,
    TASKS,
    WRITING,
    faulty_fleet,
    played,
    quick_settings,
)
from tests.fakes.serving import nothing_left, serving

from skyfleet.chat.message import Image, Message, Text, ToolCall
from skyfleet.config.environment import FleetTask
from skyfleet.envs.env import close_env, grade_env
from skyfleet.envs.fleet.env import fleet_factory, make_prompt
from skyfleet.envs.fleet.grading import grade_on_fleet, parse_verdict
from skyfleet.envs.fleet.service import Arguments, FleetService, RemoteInstance, RunnerToken
from skyfleet.envs.fleet.settings import FLEET_URL, FleetSettings
from skyfleet.envs.fleet.tool_schema import shorten_parameters
from skyfleet.envs.verifiers.run_verifier import load_state, run_verifier
from skyfleet.errors import ConfigError, EnvError, VerifierError
from skyfleet.rollouts.episode import run_episode
from skyfleet.rollouts.scripted_agents import null_policy
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks


def _call(name: str, **arguments: Any) -> Message:
    call = ToolCall(id="c1", name=name, arguments=arguments)
    return Message(role="assistant", tool_calls=(call,))


@pytest.mark.parametrize("world", WORLD_NAMES)
async def test_reference_solutions_of_every_world_score_one_and_doing_nothing_scores_zero(
    world: str,
) -> None:
    tasks = generate_world_tasks(world, split="all", count=8)
    async with faulty_fleet() as (open_env, instances, _):
        for task in tasks:
            trajectory = await played(task, open_env)
            assert trajectory.failure is None
            assert trajectory.ending is Ending.DONE
            assert trajectory.grade is not None
            assert trajectory.grade.reward == 1.0, task.key
        idle = await run_episode(tasks[0], open_env, null_policy, LIMITS)
        assert idle.grade is not None
        assert idle.grade.reward == 0.0
        assert instances.created == 9


async def test_sixteen_at_once_each_have_a_world_of_their_own() -> None:
    async with faulty_fleet() as (open_env, instances, _), asyncio.TaskGroup() as group:
        playing = [group.create_task(played(WRITING, open_env)) for _ in range(16)]
    assert [run.result().grade.reward for run in playing] == [1.0] * 16  # type: ignore[union-attr]
    assert instances.created == 16


def test_the_prompt_contains_the_environments_date_and_user() -> None:
    variables = {"CURRENT_DATE": "2026-03-02", "LOGGED_IN_USER": "zoe", "REGION": "north"}
    task = WRITING.model_copy(update={"env_variables": variables})
    system, user = make_prompt(task, today=date(2030, 1, 1))
    assert "Today is 2026-03-02." in system.text
    assert "- Your user id: zoe\n- REGION: north" in system.text
    assert "CURRENT_DATE" not in system.text
    assert "2030" not in system.text
    assert user.text == task.prompt
    bare = task.model_copy(update={"env_variables": {}})
    system, _ = make_prompt(bare, today=date(2030, 1, 1))
    assert "Today is 2030-01-01." in system.text
    assert "The environment:" not in system.text


async def test_an_agents_mistakes_are_answered_and_its_answer_ends_the_episode() -> None:
    task = next(task for task in TASKS if "submit_final_answer" in task.prompt)
    async with faulty_fleet(max_result_characters=30) as (open_env, _, faulty):
        env = await open_env(task)
        observation = await env.reset()
        assert [tool.name for tool in observation.tools][-1] == "submit_final_answer"
        unknown = await env.step(_call("list_isues"))
        assert unknown.messages[0].text.startswith(
            "Error: no tool 'list_isues'; tools: list_issues"
        )
        wrong = await env.step(_call("get_issue", number=10**6))
        assert wrong.messages[0].is_error
        assert wrong.messages[0].tool_call_id == "c1"
        first = task.solution[0]
        long = await env.step(_call(first.name, **first.arguments))
        assert "(cut: the first 30 of" in long.messages[0].text
        idle = await env.step(Message(role="assistant", content="hm"))
        assert "no tool call" in idle.messages[0].text
        number = await env.step(_call("submit_final_answer", answer=7))
        assert number.messages[0].is_error
        assert not number.done
        final = await env.step(_call("submit_final_answer", answer="no idea"))
        assert final.done
        with pytest.raises(EnvError, match="after done"):
            await env.step(Message(role="assistant", content="more"))
        grade = await grade_env(env, ())
        assert grade is not None
        assert grade.reward == 0.0
        await close_env(env)
        await close_env(env)
        with pytest.raises(EnvError, match="call reset first"):
            await env.step(Message(role="assistant", content="more"))
        assert not any("submit_final_answer" in seen for seen in faulty.seen if "/mcp" in seen)


async def test_a_verifier_that_asks_for_the_conversation_is_given_it() -> None:
    code = (
        "def validate_task(env, final_answer=None, conversation=None):\n"
        "    turns = json.loads(conversation)\n"
        "    return 1 if [t['role'] for t in turns[:3]] == ['system', 'user', 'assistant'] else 0\n"
    )
    task = WRITING.model_copy(update={"verifier_code": code})
    async with faulty_fleet() as (open_env, _, _):
        trajectory = await played(task, open_env)
    assert trajectory.grade is not None
    assert trajectory.grade.reward == 1.0


@pytest.mark.parametrize(
    "signature",
    [
        "env, answer",
        "env, answer=None, *, conversation",
        "env, *given",
        "env, *, final_answer",
        "env, **given",
        "env, other=1, final_answer='unset'",
        "env, conversation",
        "env",
    ],
)
@pytest.mark.parametrize("output", ["42", None])
async def test_the_service_passes_a_verifier_the_same_arguments_as_run_verifier(
    signature: str, output: str | None
) -> None:
    code = f"def validate_task({signature}):\n    given = dict(locals())\n    del given['env']\n"
    code += "    print(sorted(map(str, given.items())))\n    return 1\n"
    task = WRITING.model_copy(update={"verifier_code": code})
    sent: list[tuple[Any, Any]] = []

    class Service(FleetService):
        async def execute_verifier(
            self, instance: RemoteInstance, task: Task, code: str, function: str, output: Arguments
        ) -> dict[str, Any]:
            sent.append(output)
            return {"success": True, "result": 1}

    service = Service(FleetSettings(api_key="k"), RunnerToken())
    instance = RemoteInstance(id="i", root="http://r/", manager="http://m")
    await grade_on_fleet(service, instance, task, final_answer=output, conversation=())
    ((positional, named),) = sent
    names: dict[str, Any] = {}
    printed: list[str] = []
    exec(code, names | {"print": printed.append}, names)
    names["validate_task"](None, *positional, **named)
    with closing(load_state(b"")) as empty:
        ours = run_verifier(code, empty, empty, output, conversation="[]").explanation
    assert f"{printed[0]}\n" == ours


def test_a_verdict_is_a_number_and_partial_credit_replaces_only_a_zero() -> None:
    half = (
        ">>> ERROR_ACCUMULATOR >>>\n['a']\n<<< ERROR_ACCUMULATOR <<<\n"
        ">>> SUCCESS_ACCUMULATOR >>>\n['b']\n<<< SUCCESS_ACCUMULATOR <<<\n"
    )
    failed = {"success": True, "result": 0, "stdout": half}
    assert parse_verdict(failed, partial=False).reward == 0.0
    assert parse_verdict(failed, partial=True).reward == 0.5
    assert not parse_verdict(failed, partial=True).success
    assert parse_verdict({**failed, "result": 1}, partial=True).reward == 1.0
    assert parse_verdict({"success": True, "result": None}, partial=False).reward == 1.0
    assert parse_verdict({"success": True, "result": {"score": 0.5}}, partial=False).reward == 0.5
    for odd in ("1", float("nan"), 10**400, [1], {"score": "high"}):
        with pytest.raises(VerifierError, match="return a number"):
            parse_verdict({"success": True, "result": odd}, partial=False)


def _small_server(tools: dict[str, list[str]], results: dict[str, Any]) -> Any:
    """Fleet with tools of our choice an endpoint, which come on the third asking."""
    asked: list[str] = []

    async def make(request: Request) -> Response:
        root = str(request.base_url)
        urls = {"root": root, "manager": {"api": f"{root}api/v1/env"}}
        return JSONResponse({"instance_id": "i", "urls": urls})

    async def mcp(request: Request) -> Response:
        message = json.loads(await request.body())
        if message["method"] == "tools/list":
            asked.append(request.url.path)
            names = tools.get(request.url.path, []) if len(asked) > 4 else []
            result: Any = {"tools": [{"name": name, "inputSchema": {}} for name in names]}
        elif message["method"] == "tools/call":
            content = results.get(message["params"]["name"] + request.url.path)
            if content is None:
                refusal = {"code": -32602, "message": "the arguments do not fit"}
                return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "error": refusal})
            result = content if isinstance(content, dict) else {"content": content}
        else:
            result = {}
        text = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), "result": result})
        return Response(f"event: message\ndata: {text}\n\n", media_type="text/event-stream")

    async def gone(request: Request) -> Response:
        return JSONResponse({}, 404)

    return Starlette(
        routes=[
            Route("/v1/env/instances", make, methods=["POST"]),
            Route("/mcp", mcp, methods=["POST"]),
            Route("/api/v1/mcp", mcp, methods=["POST"]),
            Route("/{path:path}", gone, methods=["GET", "POST", "DELETE"]),
        ]
    )


async def test_tools_are_the_union_of_the_endpoints_without_the_screen() -> None:
    tools = {"/mcp": ["a", "b", "computer"], "/api/v1/mcp": ["b", "c"]}
    text = {"type": "text", "text": "from the first"}
    app = _small_server(tools, {"b/mcp": [text]})
    async with nothing_left(), serving(app) as base_url:
        env = await fleet_factory(quick_settings(base_url, **PATIENT))(WRITING)
        observation = await env.reset()
        assert [tool.name for tool in observation.tools] == ["a", "b", "c"]
        step = await env.step(_call("b"))
        assert step.messages[0].text == "from the first"
        refused = await env.step(_call("a", number="x"))
        assert refused.messages[0].text == "Error: the arguments do not fit"
        assert refused.messages[0].is_error
        await env.close()


@pytest.mark.parametrize(
    ("result", "shown", "is_error"),
    [
        ({"content": [], "structuredContent": {"result": []}}, '{"result": []}', False),
        ({"content": [], "structuredContent": []}, "[]", False),
        ({"structuredContent": {}}, "{}", False),
        ({"content": []}, "ok", False),
        ({"content": [{"type": "text", "text": "0"}]}, "0", False),
        ({"content": [{"type": "text", "text": '{"error": "no row"}'}]}, "Error: no row", True),
        (
            {"content": [{"type": "text", "text": '{"status": "failed", "id": 3}'}]},
            '{"status": "failed", "id": 3}',
            True,
        ),
    ],
)
async def test_an_empty_result_is_shown_and_an_error_in_a_result_is_one(
    result: dict[str, Any], shown: str, is_error: bool
) -> None:
    app = _small_server({"/mcp": ["a"]}, {"a/mcp": result})
    async with nothing_left(), serving(app) as base_url:
        env = await fleet_factory(quick_settings(base_url, **PATIENT))(WRITING)
        await env.reset()
        step = await env.step(_call("a"))
        assert (step.messages[0].text, step.messages[0].is_error) == (shown, is_error)
        await env.close()


async def test_an_async_verifier_is_graded() -> None:
    """In the form of Fleet's own docstring."""
    code = (
        "async def verify(env):\n    return len(await env.db('seed').table('issues').all()) > 0\n"
    )
    task = WRITING.model_copy(update={"verifier_code": code})
    async with faulty_fleet() as (open_env, _, _):
        trajectory = await played(task, open_env)
    assert trajectory.grade is not None
    assert trajectory.grade.reward == 1.0


def test_tool_schemas_keep_only_what_tells_which_arguments_are_accepted() -> None:
    generated = {
        "title": "searchArguments",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "title": {"title": "Title", "type": "string", "description": "Of the issue."},
            "page": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "day": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
            "point": {"type": "array", "prefixItems": [{"type": "number"}] * 2, "maxItems": 2},
            "labels": {"type": "array", "items": {"title": "Label", "$ref": "#/$defs/Label"}},
        },
        "required": ["title"],
        "$defs": {"Label": {"title": "Label", "enum": ["bug", "idea"]}},
    }
    assert shorten_parameters(generated) == {
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "Of the issue."},
            "page": {"type": "integer"},
            "day": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "point": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
            "labels": {"type": "array", "items": {"$ref": "#/$defs/Label"}},
        },
        "required": ["title"],
        "$defs": {"Label": {"enum": ["bug", "idea"]}},
    }
    assert shorten_parameters({}) == {"type": "object", "properties": {}, "required": []}


async def test_a_screen_task_has_the_computer_tool_only_and_returns_images() -> None:
    shot = {"type": "text", "text": json.dumps({"base64_image": "data:image/jpeg;base64,AAAA"})}
    app = _small_server({"/api/v1/mcp": ["a", "computer"]}, {"computer/api/v1/mcp": [shot]})
    task = WRITING.model_copy(update={"modality": "computer_use"})
    async with nothing_left(), serving(app) as base_url:
        env = await fleet_factory(quick_settings(base_url, tools_deadline_seconds=3))(task)
        observation = await env.reset()
        assert [tool.name for tool in observation.tools] == ["computer"]
        assert "Do one thing, look at the screenshot" in observation.messages[0].text
        screen = Image(b"\0\0\0", "image/jpeg")
        assert observation.messages[1].content == (Text(task.prompt), screen)
        step = await env.step(_call("computer", action="screenshot"))
        assert step.messages[0].content == (Image(b"\0\0\0", "image/jpeg"),)
        await env.close()


async def test_no_tools_for_the_modality_is_a_failed_episode() -> None:
    app = _small_server({"/mcp": ["computer"]}, {})
    async with nothing_left(), serving(app) as base_url:
        trajectory = await played(WRITING, fleet_factory(quick_settings(base_url, **PATIENT)))
        assert trajectory.failure is not None
        assert (
            "modality=tool_use leaves none of the tools ['computer']" in trajectory.failure.detail
        )


def test_settings_name_fleet_and_refuse_to_go_without_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FLEET_BASE_URL", raising=False)
    assert FleetSettings(api_key="k").base_url == FLEET_URL
    monkeypatch.setenv("FLEET_BASE_URL", "http://127.0.0.1:9300")
    assert FleetSettings(api_key="k").base_url == "http://127.0.0.1:9300"
    assert FleetSettings(api_key="k").ttl_seconds == FleetTask().ttl_seconds
    assert "secret" not in repr(FleetSettings(api_key="secret"))
    with pytest.raises(ConfigError, match="set FLEET_API_KEY"):
        FleetSettings(api_key="")
    with pytest.raises(ConfigError, match="write https://host"):
        FleetSettings(api_key="k", base_url="fleet.local")
