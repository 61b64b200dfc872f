"""ChatModels over HTTP, against a server on loopback that checks what it is sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from tests.fakes.counter_env import TASK, CounterEnv, make_factory
from tests.fakes.serving import serving

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.engines import http_client
from skyfleet.engines.anthropic_chat import AnthropicChat
from skyfleet.engines.engine import ReplyTruncatedError
from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.openai_chat import OpenAIChat
from skyfleet.engines.openai_completion import InvalidCompletionError
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import ContextFullError, EngineError
from skyfleet.rollouts.conversation import MessageConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.trajectories.trajectory import Ending

TOOL = ToolSpec(name="look", description="Look.", parameters={"type": "object"})
SAMPLING = SamplingParams(max_generate_length=64, temperature=0.5, top_p=0.9, stop=("X",), seed=3)
TALK = [
    Message(role="system", content="be brief"),
    Message(role="user", content="hi"),
    Message(
        role="assistant",
        tool_calls=(
            ToolCall(id="1", name="look", arguments={"at": 1}),
            ToolCall(id="2", name="look", arguments={}),
        ),
    ),
    Message(role="tool", content="a", tool_call_id="1"),
    Message(role="tool", content="b", tool_call_id="2", is_error=True),
]


class Server:
    """Returns `answers` in order, and records requests."""

    def __init__(self) -> None:
        self.answers: list[Response] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def answer(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        return self.answers.pop(0)


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(http_client, "INITIAL_BACKOFF_SECONDS", 0.01)
    server = Server()
    paths = ("/v1/chat/completions", "/v1/messages")
    app = Starlette(routes=[Route(path, server.answer, methods=["POST"]) for path in paths])
    async with serving(app) as url:
        server.url = url
        yield server


def reply(finish: str = "stop", **message: Any) -> Response:
    choice = {"message": {"role": "assistant", **message}, "finish_reason": finish}
    return PlainTextResponse(json.dumps({"choices": [choice]}))


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "9", "type": "function", "function": {"name": name, "arguments": arguments}}


async def ask_openai(server: Server) -> Message:
    async with OpenAIChat(f"{server.url}/v1/", model="m", api_key="k") as model:
        return await model.reply(TALK, [TOOL], SAMPLING)


async def ask_anthropic(server: Server) -> Message:
    async with AnthropicChat(server.url, model="m", api_key="k") as model:
        return await model.reply(TALK, [TOOL], SAMPLING)


async def test_openai_gets_the_conversation_and_returns_a_call(server: Server) -> None:
    server.answers = [reply(content=None, tool_calls=[call("look", '{"at": 2}')])]
    message = await ask_openai(server)
    assert message.tool_calls == (ToolCall(id="9", name="look", arguments={"at": 2}),)
    assert message.text == ""
    (body,) = server.bodies
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert json.loads(body["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {"at": 1}
    assert body["messages"][4] == {"role": "tool", "content": "b", "tool_call_id": "2"}
    assert body["tools"][0]["function"]["name"] == "look"
    sampled = [body[name] for name in ("max_tokens", "temperature", "top_p", "stop", "seed")]
    assert sampled == [64, 0.5, 0.9, ["X"], 3]
    assert server.headers[0]["authorization"] == "Bearer k"


async def test_a_lone_surrogate_is_replaced_and_can_be_sent_back(server: Server) -> None:
    server.answers = [reply(content="\ud83d", reasoning="\ud83d"), reply(content="hi")]
    async with OpenAIChat(f"{server.url}/v1/", model="m") as model:
        message = await model.reply(TALK, [], SAMPLING)
        await model.reply([*TALK, message], [], SAMPLING)
    assert (message.content, message.reasoning) == ("?", "?")


def unsupported(param: str, code: str = "unsupported_parameter") -> Response:
    message = f"'{param}' is not supported with this model."
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JSONResponse({"error": error}, 400)


async def test_an_unsupported_parameter_is_replaced_and_not_sent_again(
    server: Server,
) -> None:
    server.answers = [
        unsupported("max_tokens"),
        unsupported("top_p"),
        *[reply(content="hi")] * 2,
    ]
    sampling = SamplingParams(max_generate_length=64, temperature=1.0, top_p=1.0)
    async with OpenAIChat(f"{server.url}/v1/", model="m") as model:
        for _ in range(2):
            assert (await model.reply(TALK, [], sampling)).text == "hi"
    for body in server.bodies[2:]:
        assert body["max_completion_tokens"] == 64
        assert not body.keys() & {"max_tokens", "top_p"}
    assert len(server.bodies) == 4


@pytest.mark.parametrize("param", ["temperature", "top_p", "stop", "service_tier"])
async def test_a_parameter_that_changes_the_result_is_not_left_out(
    server: Server, param: str
) -> None:
    server.answers = [unsupported("max_tokens"), unsupported(param, "unsupported_value")]
    with pytest.raises(RequestRejectedError, match=f"'{param}' is not supported"):
        await ask_openai(server)


async def test_a_turn_of_reasoning_only_is_truncated(server: Server) -> None:
    sentence = "Could not finish the message because max_tokens or model output limit was reached."
    server.answers = [JSONResponse({"error": {"message": sentence}}, 400)]
    with pytest.raises(ReplyTruncatedError):
        await ask_openai(server)


async def test_a_truncated_reply_ends_the_episode_without_an_action(
    server: Server,
) -> None:
    server.answers = [reply(finish="length", content="I will press the")]
    env = CounterEnv()
    async with OpenAIChat(f"{server.url}/v1/", model="m") as model:
        trajectory = await run_episode(
            TASK,
            make_factory(env),
            lambda task, observation, session: MessageConversation(
                observation, model=model, sampling=SAMPLING
            ),
            Limits(max_turns=3, max_input_length=100, trajectory_timeout_seconds=5),
        )
    assert (trajectory.ending, len(trajectory.turns)) == (Ending.LENGTH, 1)
    assert trajectory.turns[0].action.text == "I will press the"
    assert (env.count, trajectory.reward) == (0, 0.0)


async def test_anthropic_gets_turns_and_returns_a_call(server: Server) -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "9", "name": "look", "input": {"at": 2}},
    ]
    server.answers = [JSONResponse({"content": blocks})]
    message = await ask_anthropic(server)
    assert message.tool_calls == (ToolCall(id="9", name="look", arguments={"at": 2}),)
    assert (message.text, message.reasoning) == ("so", "hm")
    (body,) = server.bodies
    assert body["system"] == "be brief"
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    assert [block["tool_use_id"] for block in body["messages"][2]["content"]] == ["1", "2"]
    assert body["messages"][2]["content"][1]["is_error"] is True
    assert body["messages"][1]["content"][0]["type"] == "tool_use"
    assert body["tools"][0]["input_schema"] == {"type": "object"}
    assert body["stop_sequences"] == ["X"]
    assert server.headers[0]["x-api-key"] == "k"
    assert server.headers[0]["anthropic-version"] == "2023-06-01"


async def test_anthropic_reports_a_truncated_reply(server: Server) -> None:
    block = {"type": "text", "text": "I will press the"}
    server.answers = [JSONResponse({"content": [block], "stop_reason": "max_tokens"})]
    with pytest.raises(ReplyTruncatedError) as cut:
        await ask_anthropic(server)
    assert cut.value.message.text == "I will press the"


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
async def test_transient_errors_are_retried(server: Server, ask: Any) -> None:
    both = {"choices": [{"message": {"content": "at last"}}], "content": []}
    server.answers = [
        PlainTextResponse("busy", 529),
        PlainTextResponse("", 502),
        JSONResponse(both),
    ]
    await ask(server)
    assert len(server.bodies) == 3


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        (
            [PlainTextResponse("no such model", 404)],
            r"rejected the request with 404: no such model",
        ),
        ([PlainTextResponse("hello")], r"did not return a JSON object but 200: hello"),
        ([JSONResponse({"error": "?"})], r"returned an invalid completion: error: \?; check"),
        ([PlainTextResponse("down", 503)] * 4, r"failed 4 times, last with 503: down"),
    ],
)
async def test_a_permanent_error_is_an_engine_error(
    server: Server, ask: Any, answers: list[Response], sentence: str
) -> None:
    server.answers = list(answers)
    with pytest.raises(EngineError, match=sentence):
        await ask(server)


async def test_an_unreachable_server_is_an_engine_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "INITIAL_BACKOFF_SECONDS", 0.01)
    missing = Server()
    missing.url = "http://127.0.0.1:1"
    with pytest.raises(EngineError, match=r"127.0.0.1:1/v1/messages failed 4 times.*ConnectError"):
        await ask_anthropic(missing)


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
@pytest.mark.parametrize(
    ("answers", "alone"),
    [
        ([PlainTextResponse("context too long", 400)], True),
        ([PlainTextResponse("too large", 413)], True),
        ([PlainTextResponse("cannot", 422)], True),
        ([JSONResponse({"error": "?"})], True),
        ([PlainTextResponse("who?", 401)], False),
        ([PlainTextResponse("no credit", 402)], False),
        ([PlainTextResponse("not you", 403)], False),
        ([PlainTextResponse("no such model", 404)], False),
        ([PlainTextResponse("slower", 429)] * 4, False),
        ([PlainTextResponse("never", 501)], False),
        ([PlainTextResponse("<html>")], False),
        ([PlainTextResponse("[" * 200_000)], False),
    ],
)
async def test_a_rejected_request_is_distinguished_from_a_general_error(
    server: Server, ask: Any, answers: list[Response], alone: bool
) -> None:
    server.answers = list(answers)
    with pytest.raises(EngineError) as caught:
        await ask(server)
    assert isinstance(caught.value, RequestRejectedError | InvalidCompletionError) is alone


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
@pytest.mark.parametrize(
    "text",
    ['{"error": {"code": "context_length_exceeded"}}', "prompt is too long: 9 tokens > 8 maximum"],
)
async def test_a_too_long_conversation_is_distinguished_from_other_rejections(
    server: Server, ask: Any, text: str
) -> None:
    server.answers = [PlainTextResponse(text, 400)]
    with pytest.raises(ContextFullError):
        await ask(server)
