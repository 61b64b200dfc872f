"""OpenAIEngine and OpenAIChatEngine: requests, responses, limits and missing tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from tests.fakes.serving import serving

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.engines import http_client
from skyfleet.engines.openai_chat import OpenAIChatEngine
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import ConfigError, EngineError

SAMPLING = SamplingParams(
    max_generate_length=64, temperature=0.5, top_k=5, stop=("X",), stop_token_ids=(2,), seed=3
)
TOOL = ToolSpec(name="look", description="Look.", parameters={"type": "object"})
TALK = [
    Message(role="user", content="hi"),
    Message(role="assistant", content="so", reasoning="hm"),
    Message(role="user", content="go on"),
]


class Server:
    """Returns `answers` in order, after `delay` seconds, and records requests."""

    def __init__(self) -> None:
        self.answers: list[Response] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url, self.delay, self.version = "", 0.0, "0.23.0"
        self.running = self.max_running = 0

    async def answer(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        await asyncio.sleep(self.delay)
        self.running -= 1
        return self.answers.pop(0)

    async def get_version(self, request: Request) -> Response:
        return JSONResponse({"version": self.version})


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(http_client, "INITIAL_BACKOFF_SECONDS", 0.01)
    server = Server()
    paths = ("/v1/chat/completions", "/v1/completions")
    routes = [Route(path, server.answer, methods=["POST"]) for path in paths]
    app = Starlette(routes=[*routes, Route("/version", server.get_version)])
    async with serving(app) as url:
        server.url = f"{url}/v1"
        yield server


def completed(*token_ids: int, finish: str = "stop", **more: Any) -> Response:
    """As vLLM 0.23 returns it."""
    choice = {
        "text": "?",
        "finish_reason": finish,
        "token_ids": list(token_ids),
        "logprobs": {"token_logprobs": [-0.5] * len(token_ids)},
    }
    return JSONResponse({"choices": [choice], **more})


def chatted(
    message: dict[str, Any], *token_ids: int, finish: str = "stop", **more: Any
) -> Response:
    content = [{"token": "?", "logprob": -0.5} for _ in token_ids]
    choice = {
        "message": {"role": "assistant", **message},
        "finish_reason": finish,
        "token_ids": list(token_ids),
        "logprobs": {"content": content},
    }
    return JSONResponse({"choices": [choice], "prompt_token_ids": [7, 8], **more})


async def test_prompts_and_completions_are_token_ids(server: Server) -> None:
    server.answers = [completed(11, 2)]
    async with OpenAIEngine(server.url, model="m", api_key="k") as engine:
        engine.policy_version = 4
        completion = await engine.generate([5, 6], SAMPLING, session="t/0")
    assert (completion.token_ids, completion.logprobs, completion.finish) == (
        (11, 2),
        (-0.5, -0.5),
        "stop",
    )
    assert completion.policy_version == 4
    (body,) = server.bodies
    assert body["prompt"] == [5, 6]
    assert (body["logprobs"], body["return_token_ids"], body["ignore_eos"]) == (0, True, True)
    assert (body["stop_token_ids"], body["stop"], body["top_k"]) == ([2], ["X"], 5)
    assert body["include_stop_str_in_output"] is True
    assert server.headers[0]["x-session-id"] == "t/0"
    assert server.headers[0]["authorization"] == "Bearer k"


async def test_each_session_has_its_own_request_seed(
    server: Server,
) -> None:
    server.answers = [completed(1) for _ in range(4)]
    async with OpenAIEngine(server.url, model="m") as engine:
        await engine.generate([5], SAMPLING, session="t/0")
        await engine.generate([5], SAMPLING, session="t/0")
        await engine.generate([5], SAMPLING, session="t/1")
        await engine.generate([5], replace(SAMPLING, seed=None), session="t/1")
    one, again, other = [body["seed"] for body in server.bodies[:3]]
    assert one == again != other
    assert 0 <= one < 2**63
    assert "seed" not in server.bodies[3]


@pytest.mark.parametrize(
    ("reason", "finish"), [("stop", "stop"), ("length", "length"), ("abort", "abort")]
)
async def test_the_finish_reason_is_kept(server: Server, reason: str, finish: str) -> None:
    server.answers = [completed(1, finish=reason)]
    async with OpenAIEngine(server.url, model="m") as engine:
        assert (await engine.generate([5], SAMPLING, session="s")).finish == finish


async def test_the_policy_version_of_the_server_is_recorded(server: Server) -> None:
    server.answers = [completed(1, policy_version=9)]
    async with OpenAIEngine(server.url, model="m") as engine:
        assert (await engine.generate([5], SAMPLING, session="s")).policy_version == 9


async def test_a_server_without_token_ids_is_rejected(server: Server) -> None:
    server.version = "0.9.1"
    server.answers = [JSONResponse({"choices": [{"text": "hi", "finish_reason": "stop"}]})]
    async with OpenAIEngine(server.url, model="m") as engine:
        with pytest.raises(ConfigError, match=r"vLLM 0.9.1 is too old.*only be evaluated.*0.10.2"):
            await engine.generate([5], SAMPLING, session="s")


async def test_a_chat_server_without_token_ids_is_rejected(server: Server) -> None:
    server.answers = [JSONResponse({"choices": [{"message": {"content": "hi"}}]})]
    async with OpenAIChatEngine(server.url, model="m") as engine:
        with pytest.raises(ConfigError, match=r"no token ids \(vLLM 0.23.0\).*only be evaluated"):
            await engine.chat(TALK, [], SAMPLING, session="s")


async def test_tokens_without_logprobs_are_an_engine_error(server: Server) -> None:
    server.answers = [JSONResponse({"choices": [{"token_ids": [1, 2], "logprobs": None}]})]
    async with OpenAIEngine(server.url, model="m") as engine:
        with pytest.raises(EngineError, match="2 token ids with 0 logprobs"):
            await engine.generate([5], SAMPLING, session="s")


async def test_a_chat_sends_tools_and_returns_calls_and_tokens(server: Server) -> None:
    call = {"id": "9", "type": "function", "function": {"name": "look", "arguments": '{"at": 2}'}}
    server.answers = [chatted({"content": None, "tool_calls": [call]}, 11, 12)]
    kwargs = {"enable_thinking": False}
    async with OpenAIChatEngine(server.url, model="m", chat_template_kwargs=kwargs) as engine:
        completion = await engine.chat(TALK, [TOOL], SAMPLING, session="s")
    assert completion.message.tool_calls == (ToolCall(id="9", name="look", arguments={"at": 2}),)
    assert (completion.prompt_token_ids, completion.completion.token_ids) == ((7, 8), (11, 12))
    assert completion.completion.logprobs == (-0.5, -0.5)
    (body,) = server.bodies
    assert body["tools"][0]["function"]["name"] == "look"
    assert (body["tool_choice"], body["logprobs"], body["ignore_eos"]) == ("auto", True, False)
    assert body["chat_template_kwargs"] == kwargs
    assert body["messages"][1]["reasoning_content"] == "hm"


@pytest.mark.parametrize("answer", [chatted({"content": None}), chatted({}, 2)])
async def test_an_empty_response_is_an_empty_turn(server: Server, answer: Response) -> None:
    server.answers = [answer]
    async with OpenAIChatEngine(server.url, model="m") as engine:
        completion = await engine.chat(TALK, [TOOL], SAMPLING, session="s")
    assert (completion.message.text, completion.message.tool_calls) == ("", ())


async def test_an_aborted_chat_turn_is_an_engine_error(server: Server) -> None:
    server.answers = [chatted({"content": "half a"}, 2, 3, finish="abort")]
    async with OpenAIChatEngine(server.url, model="m") as engine:
        with pytest.raises(EngineError, match="aborted the turn"):
            await engine.chat(TALK, [TOOL], SAMPLING, session="s")


async def test_the_connect_timeout_is_short(server: Server) -> None:
    async with (
        OpenAIEngine(server.url, model="m", timeout_seconds=900) as engine,
        engine.connection() as client,
    ):
        timeout = client.timeout
    assert (timeout.connect, timeout.read) == (10, 900)


async def test_connections_are_reused_from_small_pools(server: Server) -> None:
    async with OpenAIEngine(server.url, model="m", max_concurrent=40) as engine:
        for _ in range(2):
            async with AsyncExitStack() as held:
                taken = [await held.enter_async_context(engine.connection()) for _ in range(40)]
                assert sorted(Counter(map(id, taken)).values()) == [8, 16, 16]
        async with engine.connection() as one:
            pass
        async with engine.connection() as other:
            assert other is one


async def test_a_request_with_its_retries_ends_at_the_deadline(server: Server) -> None:
    server.answers = [PlainTextResponse("busy", 503, headers={"Retry-After": "60"})]
    async with OpenAIEngine(server.url, model="m", timeout_seconds=0.2) as engine:
        with pytest.raises(EngineError, match=r"completions did not respond within 0.2 s"):
            await engine.generate([5], SAMPLING, session="s")
    assert len(server.bodies) == 1


async def test_concurrent_requests_are_limited(server: Server) -> None:
    server.answers, server.delay = [completed(1) for _ in range(9)], 0.02
    async with OpenAIEngine(server.url, model="m", max_concurrent=3) as engine:
        turns = [engine.generate([5], SAMPLING, session=f"s{i}") for i in range(9)]
        await asyncio.gather(*turns)
    assert server.max_running == 3


async def test_waiting_for_a_free_connection_does_not_count_as_time(server: Server) -> None:
    server.answers, server.delay = [completed(1) for _ in range(6)], 0.1
    async with OpenAIEngine(server.url, model="m", max_concurrent=1, timeout_seconds=0.4) as engine:
        turns = [engine.generate([5], SAMPLING, session=f"s{i}") for i in range(6)]
        assert len(await asyncio.gather(*turns)) == 6
