"""Agents written against OpenAI's API: its official client talks to our server on loopback."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError
from tests.fakes.serving import serving
from tests.fakes.small_models import logprobs_of
from tests.fakes.tiny_policy import CAPACITY, MODEL, tiny_policy

from skyfleet.chat.message import Message
from skyfleet.chat.transcript import Completion
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.serving.requests import ChatCompletionRequest
from skyfleet.serving.responses import build_chat_message

HI: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
LOOK: Any = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}


class OneLine:
    """Returns its line in the tiny tokenizer's tokens, as many at a time as it may."""

    def __init__(self, line: str, *, times: int = 1) -> None:
        self.policy_version = 0
        tokens = tiny_policy().renderer.render_completion(Message(role="assistant", content=line))
        self._turns = [list(tokens) for _ in range(times)]

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        max_idle = sampling.max_generate_length
        turn = self._turns[0]
        sampled = tuple(turn[:max_idle])
        del turn[:max_idle]
        if not turn:
            del self._turns[0]
        return Completion(
            token_ids=sampled,
            logprobs=(-0.5,) * len(sampled),
            finish="length" if turn else "stop",
            policy_version=0,
        )

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


@pytest_asyncio.fixture
async def client() -> AsyncIterator[AsyncOpenAI]:
    policy_model = tiny_policy()
    async with (
        serving(policy_model.app(policy_model.engine(), api_key="k")) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.owned_by) == (MODEL, "skyfleet")


async def test_a_chat_returns_its_tokens_and_logprobs(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=HI,
        max_completion_tokens=9,
        logprobs=True,
        seed=1,
        extra_body={"return_token_ids": True},
    )
    policy_model = tiny_policy()
    (choice,) = answer.choices
    observed: Any = answer.to_dict()
    prompt, sampled = observed["prompt_token_ids"], observed["choices"][0]["token_ids"]
    assert policy_model.renderer.text(prompt).startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    expected = logprobs_of(policy_model.decoder, [*prompt, *sampled], 9).tolist()
    assert [token.logprob for token in content] == pytest.approx(expected, abs=1e-5)
    assert [token.token for token in content] == [policy_model.renderer.text([t]) for t in sampled]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 9)


async def test_a_seed_is_reproducible_and_n_choices_differ(client: AsyncOpenAI) -> None:
    async def ask(n: int) -> list[str]:
        answer = await client.completions.create(
            model=MODEL, prompt="once", max_tokens=12, seed=4, n=n
        )
        return [choice.text for choice in answer.choices]

    one, three = await ask(1), await ask(3)
    assert one == three[:1]
    assert len(set(three)) == 3


async def test_completions_accept_text_tokens_and_batches(client: AsyncOpenAI) -> None:
    tokens = tiny_policy().tokenizer.encode("once", add_special_tokens=False)

    async def ask(prompt: Any) -> list[str]:
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=6, temperature=0, logprobs=0
        )
        return [choice.text for choice in answer.choices]

    (sampled,) = await ask("once")
    assert await ask(tokens) == [sampled]
    assert await ask(["once", "once"]) == [sampled, sampled]
    assert await ask([tokens, tokens]) == [sampled, sampled]


async def test_a_text_stream_has_the_text_and_its_tokens(client: AsyncOpenAI) -> None:
    request: Any = {"model": MODEL, "prompt": "once", "max_tokens": 21, "temperature": 0}
    whole = await client.completions.create(**request)
    stream = await client.completions.create(
        **request,
        stream=True,
        logprobs=0,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    chunks = [chunk.to_dict() async for chunk in stream]
    *parts, last = chunks
    choices: list[Any] = [part["choices"][0] for part in parts]
    assert "".join(choice["text"] for choice in choices) == whole.choices[0].text
    assert [len(choice["token_ids"]) for choice in choices] == [8, 8, 5]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in choices] == [8, 8, 5]
    assert last["usage"]["completion_tokens"] == 21
    assert "prompt_token_ids" in parts[0]
    assert "prompt_token_ids" not in parts[1]


async def test_a_streamed_chat_equals_the_whole_response(client: AsyncOpenAI) -> None:
    request: Any = {"model": MODEL, "messages": HI, "max_tokens": 30, "temperature": 0}
    whole = await client.chat.completions.create(**request)
    text = ""
    finish = None
    async for chunk in await client.chat.completions.create(**request, stream=True):
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason
    assert text == whole.choices[0].message.content
    assert finish == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called(stream: bool) -> None:
    line = 'so\n<tool_call>\n{"name": "look", "arguments": {"at": 2}}\n</tool_call>'
    async with (
        serving(tiny_policy().app(OneLine(line))) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        request: Any = {"model": MODEL, "messages": HI, "tools": [LOOK], "max_tokens": 200}
        if stream:
            chunks = [c async for c in await client.chat.completions.create(**request, stream=True)]
            comparable_fields = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            calls: Any = chunks[-1].choices[0].delta.tool_calls
            finish = chunks[-1].choices[0].finish_reason
            assert len(chunks) > 2
        else:
            answer = await client.chat.completions.create(**request)
            comparable_fields = answer.choices[0].message.content or ""
            calls = answer.choices[0].message.tool_calls
            finish = answer.choices[0].finish_reason
    assert (comparable_fields, finish) == ("so", "tool_calls")
    (call,) = calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) == {"at": 2}


async def test_calls_of_different_turns_have_different_ids() -> None:
    line = '<tool_call>\n{"name": "look", "arguments": {"at": 2}}\n</tool_call>'
    messages = list(HI)
    async with (
        serving(tiny_policy().app(OneLine(line, times=3))) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        request: Any = {"model": MODEL, "tools": [LOOK], "max_tokens": 200}
        tokens: list[int] = []
        for _ in range(3):
            answer: Any = await client.chat.completions.create(
                **request, messages=messages, extra_body={"return_token_ids": True}
            )
            assert answer.prompt_token_ids[: len(tokens)] == tokens
            tokens = answer.prompt_token_ids + answer.choices[0].token_ids
            message = answer.choices[0].message
            (call,) = message.tool_calls
            messages += [message, {"role": "tool", "content": "7", "tool_call_id": call.id}]
    assert len({call.id for sampled in messages[2::2] for call in sampled.tool_calls}) == 3


def test_an_id_written_by_the_model_is_kept_unless_it_repeats() -> None:
    def call(id: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}}

    renderer = tiny_policy().renderer
    sampled = renderer.render_completion(
        Message(role="assistant", content='<tool_call>{"name": "look", "id": "a7"}</tool_call>')
    )
    for before, observed in ((["b7"], "a7"), (["a7", "b7"], "functions.look:2")):
        messages = [*HI, {"role": "assistant", "tool_calls": [call(id) for id in before]}]
        body = ChatCompletionRequest.model_validate(
            {"model": MODEL, "messages": messages, "tools": [LOOK]}
        )
        (written,) = build_chat_message(body, renderer, sampled)["tool_calls"]
        assert written["id"] == observed
    again = "".join(
        f'<tool_call>{{"name": "look", "id": "functions.look:{i}"}}</tool_call>' for i in range(2)
    )
    for before in (["functions.look:0"], ["functions.look:1"]):
        messages = [*HI, {"role": "assistant", "tool_calls": [call(id) for id in before]}]
        body = ChatCompletionRequest.model_validate(
            {"model": MODEL, "messages": messages, "tools": [LOOK]}
        )
        both = renderer.render_completion(Message(role="assistant", content=again))
        ids = [one["id"] for one in build_chat_message(body, renderer, both)["tool_calls"]]
        assert len({*ids, *before}) == 3


async def test_a_call_without_offered_tools_is_content() -> None:
    line = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    async with (
        serving(tiny_policy().app(OneLine(line))) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        request: Any = {"model": MODEL, "messages": HI, "tools": [LOOK], "tool_choice": "none"}
        answer = await client.chat.completions.create(**request)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == line
    assert answer.choices[0].finish_reason == "stop"


async def test_stop_strings_end_the_text_and_are_removed(client: AsyncOpenAI) -> None:
    request: Any = {"model": MODEL, "prompt": "once", "max_tokens": 24, "temperature": 0}
    free = (await client.completions.create(**request)).choices[0].text
    stop = free[9:12]
    end = free.index(stop)
    request["stop"] = stop
    whole = await client.completions.create(**request)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (free[:end], "stop")
    stream = await client.completions.create(**request, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.text for choice in choices) == free[:end]
    assert choices[-1].finish_reason == "stop"
    kept = await client.completions.create(
        **request, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text.startswith(free[: end + len(stop)])


async def test_a_stop_string_across_two_slices_ends_the_stream() -> None:
    async with (
        serving(tiny_policy().app(OneLine("abcdefghijklmn"))) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        stream = await client.completions.create(
            model=MODEL,
            prompt="once",
            max_tokens=100,
            stop="hij",
            stream=True,
            extra_body={"return_token_ids": True},
        )
        chunks: list[Any] = [chunk.to_dict() async for chunk in stream]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["abcdef", "g"]
    assert [len(choice["token_ids"]) for choice in choices] == [8, 2]
    assert choices[-1]["finish_reason"] == "stop"


async def test_errors_map_to_the_openai_clients_exceptions(client: AsyncOpenAI) -> None:
    request: Any = {"model": MODEL, "messages": HI}
    with pytest.raises(NotFoundError, match="model='other' is not served; use 'tiny'"):
        await client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(
        BadRequestError, match=f"max_tokens=600 do not fit.*{CAPACITY} tokens in total"
    ):
        await client.chat.completions.create(**request, max_tokens=600)
    with pytest.raises(BadRequestError, match=r"temperature=-1.*greater than or equal to 0"):
        await client.chat.completions.create(**request, temperature=-1)
    with pytest.raises(BadRequestError, match=r"presence_penalty=1 is not supported; leave it out"):
        await client.chat.completions.create(**request, presence_penalty=1)
    with pytest.raises(BadRequestError, match=r"tool_choice='required' needs tools"):
        await client.chat.completions.create(**request, tool_choice="required")
    with pytest.raises(BadRequestError, match="stream=true supports one prompt"):
        await client.completions.create(model=MODEL, prompt=["a", "b"], stream=True)
    with pytest.raises(AuthenticationError, match="does not contain this server's key"):
        await client.with_options(api_key="other").models.list()
