"""A fault between us and Fleet is one failed episode or one unknown grade."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.fakes.faulty_fleet import (
    KEY,
    PATIENT,
    TASKS,
    WRITING,
    faulty_fleet,
    played,
    quick_settings,
    start_jail,
)
from tests.fakes.serving import nothing_left, serving

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.env import close_env, grade_env
from skyfleet.envs.fleet import service
from skyfleet.envs.fleet.env import fleet_factory
from skyfleet.envs.fleet.service import FleetService, RunnerToken
from skyfleet.envs.fleet.settings import FleetSettings
from skyfleet.errors import EnvError, VerifierError
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import oracle_policy
from skyfleet.trajectories.trajectory import Ending
from skyfleet.worlds.fleet_server.server import build_fleet_app

_TOKEN = "/v1/runner-auth/token"


FAULTS = ("refuse", "hang", "cut")
PLACES = ("/v1/env/instances", "tools/list", "tools/call")


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        # Every fault and every place once, the other pairs where there is time.
        pytest.param(place, fault, marks=() if row == column else pytest.mark.exhaustive)
        for row, place in enumerate(PLACES)
        for column, fault in enumerate(FAULTS)
    ],
)
async def test_a_server_fault_fails_one_episode_and_not_the_next(place: str, fault: str) -> None:
    broken = True

    def goes_wrong(path: str, body: bytes) -> str | None:
        return fault if broken and (path == place or place.encode() in body) else None

    async with faulty_fleet(goes_wrong) as (open_env, _, _):
        trajectory = await played(WRITING, open_env)
        assert trajectory.ending is Ending.FAILED
        assert trajectory.grade is None
        assert trajectory.failure is not None
        assert trajectory.failure.kind == "EnvError"
        broken = False
        well = await played(WRITING, open_env)
        assert well.grade is not None
        assert well.grade.reward == 1.0


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("/v1/env/instances", "fail"),
        ('"name":"list_issues"', "refuse"),
        ('"name":"update_issue"', "refuse"),
        ("tools/list", "hang"),
        ("tools/list", "refuse"),
    ],
)
async def test_one_fault_does_not_lose_the_episode(place: str, fault: str) -> None:
    faults = iter([fault])

    def goes_wrong_once(path: str, body: bytes) -> str | None:
        hit = path == place or place.encode() in body
        return next(faults, None) if hit else None

    patient = {**PATIENT, "tools_deadline_seconds": 3}
    async with faulty_fleet(goes_wrong_once, **patient) as (open_env, instances, _):
        trajectory = await played(WRITING, open_env)
        assert trajectory.failure is None
        assert trajectory.grade is not None
        assert trajectory.grade.reward == 1.0
        assert instances.created == 1
    assert next(faults, None) is None


async def test_an_instance_that_has_ended_is_asked_once() -> None:
    async with faulty_fleet(lambda path, body: None, **PATIENT) as (open_env, instances, faulty):
        env = await open_env(WRITING)
        await env.reset()
        instances.close_all()
        faulty.seen.clear()
        read = ToolCall(id="c", name="list_issues", arguments={})
        with pytest.raises(EnvError, match=r"the instance has ended: 410 .*raise .*ttl_seconds"):
            await env.step(Message(role="assistant", tool_calls=(read,)))
        with pytest.raises(VerifierError, match="no grade: the instance has ended: 410"):
            await grade_env(env, ())
        asked = [seen.split(" ")[0].rpartition("/")[2] for seen in faulty.seen]
        assert asked == ["mcp", "execute"]
        await close_env(env)


async def test_an_instance_that_ends_before_its_tools_are_listed_is_not_waited_for() -> None:
    pools: list[Any] = []

    def end_first(path: str, body: bytes) -> str | None:
        if b"initialize" in body:
            pools[0].close_all()
        return None

    async with faulty_fleet(end_first, **PATIENT) as (open_env, instances, faulty):
        pools.append(instances)
        trajectory = await played(WRITING, open_env)
        assert trajectory.failure is not None
        assert "the instance has ended" in trajectory.failure.detail
    assert sum("/mcp" in seen for seen in faulty.seen) == 1


async def test_after_a_lost_answer_only_read_only_calls_are_retried() -> None:
    lost: list[str] = []

    def forget_once(path: str, body: bytes) -> str | None:
        called = json.loads(body or b"{}").get("params", {}).get("name")
        if called is None or called in lost:
            return None
        lost.append(called)
        return "forget"

    async with faulty_fleet(forget_once) as (open_env, _, faulty):
        trajectory = await played(WRITING, open_env)
        assert trajectory.failure is not None
        assert trajectory.failure.detail.startswith("tool update_issue: ")
    calls = [json.loads(seen.split(" ", 1)[1]) for seen in faulty.seen if "tools/call" in seen]
    names = [call["params"]["name"] for call in calls]
    assert names == ["list_issues", "list_issues", "update_issue"]


async def test_an_instance_created_despite_a_lost_answer_is_used() -> None:
    lost: list[str] = []

    def forget_once(path: str, body: bytes) -> str | None:
        if path != "/v1/env/instances" or lost:
            return None
        lost.append(path)
        return "forget"

    async with faulty_fleet(forget_once) as (open_env, instances, _):
        trajectory = await played(WRITING, open_env)
        assert trajectory.grade is not None
        assert instances.created == 1


async def test_an_episode_cancelled_during_provisioning_leaves_no_instance() -> None:
    app = build_fleet_app(TASKS, api_key=KEY)

    async def made_slowly(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/v1/env/instances":
            await asyncio.sleep(0.3)
        await app(scope, receive, send)

    async with nothing_left(), serving(made_slowly) as base_url:
        open_env = fleet_factory(quick_settings(base_url, provisioning_timeout_seconds=5))
        short = Limits(max_turns=5, max_input_length=10**6, trajectory_timeout_seconds=0.1)
        trajectory = await run_episode(WRITING, open_env, oracle_policy, short)
        assert (trajectory.ending, trajectory.grade) == (Ending.FAILED, None)
        playing = asyncio.create_task(played(WRITING, open_env))
        await asyncio.sleep(0.1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert app.state.instances.created == app.state.instances.deleted == 2


async def test_a_close_that_is_cancelled_still_deletes_the_instance() -> None:
    async with faulty_fleet() as (open_env, instances, _):
        env = await open_env(WRITING)
        await env.reset()
        closing = asyncio.create_task(close_env(env))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await asyncio.sleep(0.2)
        assert instances.deleted == 1


async def test_a_full_server_is_waited_for_and_a_wrong_key_is_not() -> None:
    await start_jail()
    app = build_fleet_app(TASKS, api_key=KEY, max_instances=1)
    async with nothing_left(), serving(app) as base_url:
        open_env = fleet_factory(quick_settings(base_url, first_wait_seconds=0.1, **PATIENT))
        first = await open_env(WRITING)
        await first.reset()
        waiting = asyncio.create_task(played(WRITING, open_env))
        await asyncio.sleep(0.05)
        await first.close()
        assert (await waiting).grade is not None
        stranger = fleet_factory(FleetSettings(api_key="other", base_url=base_url))
        trajectory = await played(WRITING, stranger)
        assert trajectory.failure is not None
        assert "401" in trajectory.failure.detail
        assert "check FLEET_API_KEY" in trajectory.failure.detail


async def test_an_answer_that_is_no_instance_is_a_failed_episode() -> None:
    async def login(request: Request) -> Response:
        return Response("<html>please log in</html>")

    app = Starlette(routes=[Route("/{path:path}", login, methods=["GET", "POST", "DELETE"])])
    async with nothing_left(), serving(app) as base_url:
        trajectory = await played(WRITING, fleet_factory(quick_settings(base_url)))
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "EnvError"
    assert "please log in" in trajectory.failure.detail


CRASHING = "def validate_task(env):\n    return env.db('current').table('nowhere').all()\n"
UNJUDGED = "def validate_task(env):\n    print('JUDGE ERROR: no answer')\n    return 0\n"
BROKEN = "def validate_task(env) return 1\n"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (CRASHING, "nowhere"),
        (UNJUDGED, "JUDGE ERROR"),
        (BROKEN, "cannot be parsed"),
        (None, "None"),
    ],
    ids=["crashing", "unjudged", "broken", "none"],
)
async def test_a_verifier_that_gives_no_verdict_leaves_the_grade_unknown(
    code: str | None, output: str
) -> None:
    task = WRITING.model_copy(update={"verifier_code": code})
    async with faulty_fleet() as (open_env, _, _):
        trajectory = await played(task, open_env)
    assert trajectory.ending is Ending.DONE
    assert trajectory.grade is None
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "VerifierError"
    assert output in trajectory.failure.detail


async def test_a_verifier_is_retried_when_the_service_fails() -> None:
    stumbles = iter(["refuse"])

    def stumble(path: str, body: bytes) -> str | None:
        return next(stumbles, None) if path == "/v1/verifiers/execute" else None

    async with faulty_fleet(stumble) as (open_env, _, _):
        trajectory = await played(WRITING, open_env)
    assert trajectory.grade is not None
    assert trajectory.grade.reward == 1.0


async def test_a_runner_token_that_was_not_given_once_is_asked_for_again() -> None:
    stumbles = iter(["refuse"])

    def stumble(path: str, body: bytes) -> str | None:
        return next(stumbles, None) if path == _TOKEN else None

    async with faulty_fleet(stumble) as (open_env, _, faulty):
        for _ in range(2):
            assert (await played(WRITING, open_env)).grade is not None
    assert [seen.split()[0] for seen in faulty.seen].count(_TOKEN) == 2
    tokens = [t for seen, t in zip(faulty.seen, faulty.tokens, strict=True) if "tools/" in seen]
    assert len(set(tokens)) == 1
    assert tokens[0]


@pytest.mark.parametrize("status", [401, 404])
async def test_a_runner_token_that_has_been_replaced_is_renewed_within_the_episode(
    status: int,
) -> None:
    valid, asked = "old", []

    async def answer(request: Request) -> Response:
        if request.url.path == _TOKEN:
            asked.append(valid)
            return JSONResponse({"token": valid})
        given = request.headers.get("x-runner-token")
        return JSONResponse({"given": given}, 200 if given == valid else status)

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    async with nothing_left(), serving(app) as base_url:
        token = RunnerToken()
        one, other = (FleetService(quick_settings(base_url), token) for _ in range(2))
        one.open()
        other.open()
        for service in (one, other, one):
            sent = await service.send_to_instance("/instances/i/mcp", seconds=5, json={})
            assert sent.json() == {"given": valid}
            if service is other:
                valid = "new"
        valid = ""
        lost = await one.send_to_instance("/instances/i/mcp", seconds=5, json={})
        assert lost.status_code == status, "no token helps, and that is said"
        await one.close()
        await other.close()
    assert asked == ["old", "new", ""]


async def test_a_fleet_without_runner_tokens_is_asked_for_one_once() -> None:
    async with faulty_fleet(lambda path, _: "deny" if path == _TOKEN else None) as opened:
        open_env, _, faulty = opened
        for _ in range(2):
            assert (await played(WRITING, open_env)).grade is not None
    assert [seen.split()[0] for seen in faulty.seen].count(_TOKEN) == 1


async def test_an_idle_connection_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server may be closing it, and the request would be lost."""
    monkeypatch.setattr(service, "_IDLE_SECONDS", 0.1)
    ports: list[int] = []

    async def note_port(request: Request) -> Response:
        assert request.client is not None
        ports.append(request.client.port)
        return Response()

    async with serving(Starlette(routes=[Route("/", note_port)])) as url:
        connection = FleetService(quick_settings(url), RunnerToken())
        connection.open()
        for idle_seconds in (0, 0, 0.2):
            await asyncio.sleep(idle_seconds)
            await connection.send("GET", "/", seconds=5)
        await connection.close()
    assert ports[0] == ports[1] != ports[2]
