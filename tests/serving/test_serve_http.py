"""The HTTP server: metrics, sessions, cancellation and exact continuation."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serving import nothing_left, serving
from tests.fakes.tiny_policy import MODEL, tiny_policy

from skyfleet.chat.message import Message
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.errors import EngineError
from skyfleet.serving.generation import Sessions
from skyfleet.serving.token_cache import TokenCache


class ModelService:
    def __init__(self, client: httpx.AsyncClient, engine: EmbeddedEngine) -> None:
        self.client, self.engine = client, engine

    async def chat(self, messages: list[Any], **more: Any) -> dict[str, Any]:
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": 9,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = await self.client.post("/v1/chat/completions", json={**body, **more})
        answer: dict[str, Any] = response.raise_for_status().json()
        return answer

    async def metric(self, name: str) -> float:
        lines = (await self.client.get("/metrics")).text.splitlines()
        (line,) = [line for line in lines if line.startswith(f"skyfleet_{name} ")]
        return float(line.split()[1])


@pytest_asyncio.fixture
async def served() -> AsyncIterator[ModelService]:
    engine = tiny_policy().engine()
    async with (
        serving(tiny_policy().app(engine)) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield ModelService(client, engine)


HI = {"role": "user", "content": "hi"}
ON = {"role": "user", "content": "go on"}


def tokens_of(answer: dict[str, Any]) -> list[int]:
    sampled: list[int] = answer["choices"][0]["token_ids"]
    prompt: list[int] = answer["prompt_token_ids"]
    return prompt + sampled


async def test_a_conversation_sent_back_continues_from_the_sampled_tokens(
    served: ModelService,
) -> None:
    messages: list[Any] = [HI]
    before: list[int] = []
    for _ in range(3):
        answer = await served.chat(messages, temperature=3.0)
        assert answer["prompt_token_ids"][: len(before)] == before
        before = tokens_of(answer)
        messages += [answer["choices"][0]["message"], ON]


async def test_a_conversation_continues_from_its_kv_cache(served: ModelService) -> None:
    answer = await served.chat([HI])
    message = answer["choices"][0]["message"]
    computed = served.engine.tokens_computed
    after = await served.chat([HI, message, ON])
    new = len(tokens_of(after)) - len(tokens_of(answer))
    assert (
        served.engine.tokens_computed - computed == new
    )  # the last token of the first turn, not of this one


async def test_a_changed_history_is_rendered_again(served: ModelService) -> None:
    answer = await served.chat([HI])
    changed = {"role": "assistant", "content": "I said something else"}
    after = await served.chat([HI, changed, ON])
    text = tiny_policy().renderer.text(after["prompt_token_ids"])
    assert "I said something else" in text
    assert after["prompt_token_ids"][: len(tokens_of(answer))] != tokens_of(answer)


async def test_one_session_generates_one_turn_at_a_time(served: ModelService) -> None:
    headers = {"X-Session-ID": "mine"}
    body = {"model": MODEL, "prompt": "once", "max_tokens": 12, "seed": 1}
    answers = await asyncio.gather(
        *[served.client.post("/v1/completions", json=body, headers=headers) for _ in range(4)]
    )
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnected_client_cancels_its_turn(served: ModelService, stream: bool) -> None:
    body = {
        "model": MODEL,
        "prompt": "once",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": stream,
    }
    await served.metric("turns_running")  # opens this client's own connection first
    async with nothing_left():
        async with httpx.AsyncClient(base_url=served.client.base_url) as leaving:
            asking = asyncio.create_task(leaving.post("/v1/completions", json=body))
            while await served.metric("turns_running") == 0:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.005)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        while await served.metric("turns_running"):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        computed = served.engine.tokens_computed
        await asyncio.sleep(0.05)
        assert served.engine.tokens_computed == computed < 400


async def test_metrics_count_requests_and_tokens(served: ModelService) -> None:
    served.engine.policy_version = 6
    answer = await served.chat([HI])
    assert answer["policy_version"] == 6
    await served.client.post("/v1/completions", content="{")
    assert await served.metric("generated_tokens_total") == 9
    assert await served.metric("prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert await served.metric("policy_version") == 6
    text = (await served.client.get("/metrics")).text
    assert 'skyfleet_requests_total{path="/v1/completions",status="400"} 1' in text
    assert "# TYPE skyfleet_turns_running gauge" in text
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} == {
        "skyfleet_generated_tokens_total",
        "skyfleet_policy_version",
        "skyfleet_prompt_tokens_total",
        "skyfleet_requests_total",
        "skyfleet_turn_seconds_total",
        "skyfleet_turns_running",
        "skyfleet_turns_total",
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{", "the body is not JSON"),
        ("[]", "the body is not a JSON object"),
        ('{"model": "tiny"}', "prompt is missing; send it"),
        ('{"model": "tiny", "prompt": []}', "0 prompt tokens"),
        ('{"model": "tiny", "prompt": [5, 999999]}', "prompt token 999999 is outside"),
        ('{"model": "tiny", "prompt": [[5], [5, -3]]}', "prompt token -3 is outside"),
        (f'{{"model": "tiny", "seed": 1, "prompt": [{10**30}]}}', "a number that is no token id"),
        ('{"model": "tiny", "prompt": "a", "echo": true}', "echo=True is not supported"),
        ('{"model": "tiny", "prompt": "a", "guided_json": {}}', "guided_json={} is not supported"),
        ('{"model": "tiny", "prompt": "a", "logprobs": 5}', "logprobs=5"),
    ],
)
async def test_an_invalid_body_is_rejected_with_the_reason(
    served: ModelService, body: str, expected: str
) -> None:
    answer = await served.client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.search(expected, error["message"])


async def test_an_unknown_path_is_rejected_in_openais_format(served: ModelService) -> None:
    answer = await served.client.get("/v1/embeddings")
    assert answer.status_code == 404
    assert "GET /v1/embeddings is not served here" in answer.json()["error"]["message"]
    assert (await served.client.get("/health")).status_code == 200


async def test_a_stream_with_an_unknown_token_is_an_invalid_request(served: ModelService) -> None:
    body = {"model": MODEL, "prompt": [999_999], "stream": True}
    text = (await served.client.post("/v1/completions", json=body)).text
    assert json.loads(text.split("\n\n")[0].removeprefix("data: "))["error"]["type"] == (
        "invalid_request_error"
    )


async def test_a_chat_request_may_only_repeat_the_servers_template_kwargs() -> None:
    policy_model, kwargs = tiny_policy(), {"enable_thinking": False}
    body = {"model": MODEL, "messages": [HI], "max_tokens": 2}
    async with (
        serving(policy_model.app(policy_model.engine(), template_kwargs=kwargs)) as url,
        httpx.AsyncClient(base_url=f"{url}/v1") as client,
    ):
        sampled = [
            await client.post("/chat/completions", json={**body, "chat_template_kwargs": sent})
            for sent in (kwargs, {}, {"enable_thinking": True})
        ]
    assert [answer.status_code for answer in sampled] == [200, 200, 400]
    assert "chat_template_kwargs={'enable_thinking': True} is not supported" in sampled[2].text


async def test_an_engine_error_is_reported_and_ends_the_stream() -> None:
    broken = ScriptedEngine(EngineError("out of memory"))
    body = {"model": MODEL, "prompt": "once", "stream": True}
    async with (
        serving(tiny_policy().app(broken)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        text = (await client.post("/v1/completions", json=body)).text
        whole = await client.post("/v1/completions", json={**body, "stream": False})
    first, last, *_ = text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["error"]["message"] == "out of memory"
    assert last == "data: [DONE]"
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")


async def test_the_least_recently_used_idle_session_is_released_first() -> None:
    engine = ScriptedEngine()
    sessions = Sessions(engine, max_idle=2)
    async with sessions.acquire("busy"):
        for name in ("a", "b", "a", "c"):
            async with sessions.acquire(name):
                assert not sessions.is_free(name)
        assert engine.released == ["b"]
    assert engine.released == ["b", "busy"]  # least recently used


def test_a_full_token_cache_drops_the_oldest_conversation() -> None:
    renderer = tiny_policy().renderer
    token_cache = TokenCache(renderer, max_tokens=10)
    talks = [[Message(role="user", content=text), Message(role="assistant")] for text in "ab"]
    more = Message(role="user", content="go on")
    for session, messages in zip("ab", talks, strict=True):
        token_cache.store(messages, (), [1, 2, 3, 4, 5, 6], session=session, client=None)
    assert token_cache.build_prompt([*talks[0], more], (), client=None).session is None
    known = token_cache.build_prompt([*talks[1], more], (), client=None)
    assert (known.session, known.token_ids[:6]) == ("b", [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("client", [None, "mine"])
def test_the_same_text_from_other_tokens_is_rendered_again_without_a_session_name(
    client: str | None,
) -> None:
    renderer = tiny_policy().renderer
    token_cache = TokenCache(renderer)
    messages = [Message(role="user", content="a"), Message(role="assistant", content="b")]
    longer = [*messages, Message(role="user", content="go on")]
    token_cache.store(messages, (), [1, 2, 3], session="s", client=client)
    token_cache.store(
        messages, (), [1, 2, 3], session="s", client=client
    )  # the same tokens again are not ambiguous
    assert token_cache.build_prompt(longer, (), client=client).token_ids[:3] == [1, 2, 3]
    token_cache.store(messages, (), [1, 9, 3], session="t", client=None)
    observed = token_cache.build_prompt(longer, (), client=client)
    if client is None:
        assert (observed.session, observed.token_ids) == (None, renderer.render_prompt(longer, ()))
    else:
        assert (observed.session, observed.token_ids[:3]) == ("s", [1, 2, 3])
