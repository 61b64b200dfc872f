"""What the server does beside speaking: counting, forgetting, stopping, and going on exactly."""

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
from tests.fakes.tiny_speaker import MODEL, tiny_speaker

from skyfleet.chat.message import Message
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.errors import EngineError
from skyfleet.serving.sessions import Sessions
from skyfleet.serving.token_cache import Threads


class Served:
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
async def served() -> AsyncIterator[Served]:
    engine = tiny_speaker().engine()
    async with (
        serving(tiny_speaker().app(engine)) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield Served(client, engine)


HI = {"role": "user", "content": "hi"}
ON = {"role": "user", "content": "go on"}


def tokens_of(answer: dict[str, Any]) -> list[int]:
    said: list[int] = answer["choices"][0]["token_ids"]
    prompt: list[int] = answer["prompt_token_ids"]
    return prompt + said


async def test_a_chat_sent_back_goes_on_from_the_tokens_that_were_sampled(served: Served) -> None:
    talk: list[Any] = [HI]
    before: list[int] = []
    for _ in range(3):
        answer = await served.chat(talk, temperature=3.0)
        assert answer["prompt_token_ids"][: len(before)] == before
        before = tokens_of(answer)
        talk += [answer["choices"][0]["message"], ON]


async def test_a_chat_goes_on_from_its_cache(served: Served) -> None:
    answer = await served.chat([HI])
    message = answer["choices"][0]["message"]
    computed = served.engine.tokens_computed
    after = await served.chat([HI, message, ON])
    new = len(tokens_of(after)) - len(tokens_of(answer))
    assert served.engine.tokens_computed - computed == new  # the last of before, not of now


async def test_a_changed_past_is_rendered_anew(served: Served) -> None:
    answer = await served.chat([HI])
    changed = {"role": "assistant", "content": "I said something else"}
    after = await served.chat([HI, changed, ON])
    text = tiny_speaker().renderer.text(after["prompt_token_ids"])
    assert "I said something else" in text
    assert after["prompt_token_ids"][: len(tokens_of(answer))] != tokens_of(answer)


async def test_one_session_speaks_one_turn_at_a_time(served: Served) -> None:
    headers = {"X-Session-ID": "mine"}
    body = {"model": MODEL, "prompt": "once", "max_tokens": 12, "seed": 1}
    answers = await asyncio.gather(
        *[served.client.post("/v1/completions", json=body, headers=headers) for _ in range(4)]
    )
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_stops_its_turn(served: Served, stream: bool) -> None:
    body = {
        "model": MODEL,
        "prompt": "once",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": stream,
    }
    await served.metric("turns_running")  # so that its own connection is there already
    async with nothing_left():
        async with httpx.AsyncClient(base_url=served.client.base_url) as leaving:
            asking = asyncio.create_task(leaving.post("/v1/completions", json=body))
            while await served.metric("turns_running") == 0:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.005)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        while await served.metric("turns_running"):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        computed = served.engine.tokens_computed
        await asyncio.sleep(0.05)
        assert served.engine.tokens_computed == computed < 400


async def test_metrics_count_requests_and_tokens(served: Served) -> None:
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


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "the body is not JSON"),
        ("[]", "the body is not a JSON object"),
        ('{"model": "tiny"}', "prompt is missing; send it"),
        ('{"model": "tiny", "prompt": []}', "0 prompt tokens"),
        ('{"model": "tiny", "prompt": [5, 999999]}', "prompt token 999999 is outside"),
        ('{"model": "tiny", "prompt": [[5], [5, -3]]}', "prompt token -3 is outside"),
        (f'{{"model": "tiny", "seed": 1, "prompt": [{10**30}]}}', "a number that is no token id"),
        ('{"model": "tiny", "prompt": "a", "echo": true}', "echo=True is not served"),
        ('{"model": "tiny", "prompt": "a", "guided_json": {}}', "guided_json={} is not served"),
        ('{"model": "tiny", "prompt": "a", "logprobs": 5}', "logprobs=5"),
    ],
)
async def test_a_body_that_cannot_be_served_is_refused_in_one_sentence(
    served: Served, body: str, says: str
) -> None:
    answer = await served.client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.search(says, error["message"])


async def test_an_address_that_is_not_served_is_told_in_openais_shape(served: Served) -> None:
    answer = await served.client.get("/v1/embeddings")
    assert answer.status_code == 404
    assert "GET /v1/embeddings is not served here" in answer.json()["error"]["message"]
    assert (await served.client.get("/health")).status_code == 200


async def test_a_stream_of_a_foreign_prompt_says_whose_fault_it_is(served: Served) -> None:
    body = {"model": MODEL, "prompt": [999_999], "stream": True}
    text = (await served.client.post("/v1/completions", json=body)).text
    assert json.loads(text.split("\n\n")[0].removeprefix("data: "))["error"]["type"] == (
        "invalid_request_error"
    )


async def test_a_chat_may_say_the_template_kwargs_that_are_served_and_no_others() -> None:
    policy_model, kwargs = tiny_speaker(), {"enable_thinking": False}
    body = {"model": MODEL, "messages": [HI], "max_tokens": 2}
    async with (
        serving(policy_model.app(policy_model.engine(), template_kwargs=kwargs)) as url,
        httpx.AsyncClient(base_url=f"{url}/v1") as client,
    ):
        said = [
            await client.post("/chat/completions", json={**body, "chat_template_kwargs": sent})
            for sent in (kwargs, {}, {"enable_thinking": True})
        ]
    assert [answer.status_code for answer in said] == [200, 200, 400]
    assert "chat_template_kwargs={'enable_thinking': True} is not served" in said[2].text


async def test_an_engine_that_fails_says_so_and_ends_the_stream() -> None:
    broken = ScriptedEngine(EngineError("out of memory"))
    body = {"model": MODEL, "prompt": "once", "stream": True}
    async with (
        serving(tiny_speaker().app(broken)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        text = (await client.post("/v1/completions", json=body)).text
        whole = await client.post("/v1/completions", json={**body, "stream": False})
    first, last, *_ = text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["error"]["message"] == "out of memory"
    assert last == "data: [DONE]"
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")


async def test_the_oldest_idle_sessions_are_given_up_first() -> None:
    engine = ScriptedEngine()
    sessions = Sessions(engine, most=2)
    async with sessions.held("busy"):
        for name in ("a", "b", "a", "c"):
            async with sessions.held(name):
                assert not sessions.is_free(name)
        assert engine.released == ["b"]
    assert engine.released == ["b", "busy"]  # it was taken first


def test_threads_forget_the_oldest_when_they_are_full() -> None:
    renderer = tiny_speaker().renderer
    threads = Threads(renderer, most_tokens=10)
    talks = [[Message(role="user", content=text), Message(role="assistant")] for text in "ab"]
    more = Message(role="user", content="go on")
    for session, talk in zip("ab", talks, strict=True):
        threads.keep(talk, (), [1, 2, 3, 4, 5, 6], session=session, client=None)
    assert threads.prompt([*talks[0], more], (), client=None).session is None
    known = threads.prompt([*talks[1], more], (), client=None)
    assert (known.session, known.token_ids[:6]) == ("b", [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("client", [None, "mine"])
def test_words_that_came_from_other_tokens_go_on_from_neither_unless_they_have_a_name(
    client: str | None,
) -> None:
    renderer = tiny_speaker().renderer
    threads = Threads(renderer)
    talk = [Message(role="user", content="a"), Message(role="assistant", content="b")]
    longer = [*talk, Message(role="user", content="go on")]
    threads.keep(talk, (), [1, 2, 3], session="s", client=client)
    threads.keep(talk, (), [1, 2, 3], session="s", client=client)  # the same again is no doubt
    assert threads.prompt(longer, (), client=client).token_ids[:3] == [1, 2, 3]
    threads.keep(talk, (), [1, 9, 3], session="t", client=None)
    told = threads.prompt(longer, (), client=client)
    if client is None:
        assert (told.session, told.token_ids) == (None, renderer.open(longer, ()))
    else:
        assert (told.session, told.token_ids[:3]) == ("s", [1, 2, 3])
