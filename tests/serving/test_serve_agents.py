"""What agents send beside messages: tool choices, JSON formats, several streams, and the responses API."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError
from tests.fakes.serving import serving
from tests.fakes.tiny_policy import MODEL, tiny_policy
from tests.serving.test_serve_openai_client import OneLine

HI: Any = [{"role": "user", "content": "hi"}]
KINDS: Any = {
    "type": "object",
    "properties": {"kind": {"enum": ["heron", "wren"]}, "large": {"type": "boolean"}},
    "required": ["kind", "large"],
    "additionalProperties": False,
}


def tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": KINDS}}


TOOLS = [tool("look"), tool("draw")]
CALL = '<tool_call>\n{"name": "look", "arguments": {"kind": "wren", "large": true}}\n</tool_call>'


@pytest_asyncio.fixture
async def client() -> AsyncIterator[AsyncOpenAI]:
    policy_model = tiny_policy()
    async with (
        serving(policy_model.app(policy_model.engine())) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def ask(client: AsyncOpenAI, *, tokens: int = 100, **options: Any) -> Any:
    return await client.chat.completions.create(
        model=MODEL, messages=HI, seed=3, max_completion_tokens=tokens, **options
    )


def check_arguments(text: str) -> None:
    arguments = json.loads(text)
    assert arguments.keys() == {"kind", "large"}
    assert arguments["kind"] in ("heron", "wren")
    assert isinstance(arguments["large"], bool)


async def test_a_required_call_is_made_by_a_model_that_samples_at_random(
    client: AsyncOpenAI,
) -> None:
    answer = await ask(client, tools=TOOLS, tool_choice="required", n=2)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        assert call.function.name in ("look", "draw")
        check_arguments(call.function.arguments)
        assert choice.finish_reason == "tool_calls"


async def test_a_named_tool_is_the_one_that_is_called(client: AsyncOpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "draw"}}
    answer = await ask(client, tools=TOOLS, tool_choice=choice)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["draw"]


async def test_a_tool_with_empty_properties_is_called_without_arguments(
    client: AsyncOpenAI,
) -> None:
    nothing = {"name": "wait", "parameters": {"type": "object", "properties": {}}}
    tools: Any = [{"type": "function", "function": nothing}]
    answer = await ask(client, tools=tools, tool_choice="required", n=4)
    calls = [call.function for one in answer.choices for call in one.message.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == [("wait", "{}")] * 4


async def test_a_named_tool_that_is_not_offered_is_refused(client: AsyncOpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "fly"}}
    with pytest.raises(BadRequestError, match="names 'fly', which is not among the tools"):
        await ask(client, tools=TOOLS, tool_choice=choice)


async def test_a_json_schema_constrains_the_text(client: AsyncOpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "bird", "schema": KINDS}}
    answer = await ask(client, response_format=schema)
    check_arguments(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"


async def test_a_json_object_is_the_beginning_of_one_wherever_the_limit_cuts_it(
    client: AsyncOpenAI,
) -> None:
    answer = await ask(client, response_format={"type": "json_object"}, tokens=40)
    choice = answer.choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        json.loads(choice.message.content)


async def test_a_streamed_schema_is_constrained_over_its_slices(client: AsyncOpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "bird", "schema": KINDS}}
    text = ""
    async for chunk in await ask(client, response_format=schema, stream=True):
        text += chunk.choices[0].delta.content or ""
    check_arguments(text)


async def test_a_schema_that_cannot_be_guaranteed_is_refused(client: AsyncOpenAI) -> None:
    schema: Any = {"name": "x", "schema": {"type": "string", "pattern": "a+"}}
    with pytest.raises(BadRequestError, match="keyword 'pattern' is not supported"):
        await ask(client, response_format={"type": "json_schema", "json_schema": schema})


@pytest.mark.parametrize(
    "options",
    [
        {"tools": TOOLS, "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True, "top_logprobs": 1},
    ],
)
async def test_an_engine_without_logits_processors_refuses_constraints(options: Any) -> None:
    app = tiny_policy().app(OneLine("hello"))
    async with (
        serving(app) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(BadRequestError, match="which this engine cannot"):
            await ask(client, **options)


@pytest.mark.parametrize(("parallel", "n_calls"), [(True, 2), (False, 1)])
async def test_without_parallel_calls_a_turn_has_one(parallel: bool, n_calls: int) -> None:
    app = tiny_policy().app(OneLine(f"{CALL}\n{CALL}"))
    async with (
        serving(app) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await ask(client, tools=TOOLS, parallel_tool_calls=parallel, tokens=200)
    assert len(answer.choices[0].message.tool_calls) == n_calls


async def test_several_choices_are_streamed_at_once(client: AsyncOpenAI) -> None:
    whole = await ask(client, n=3, temperature=0, tokens=20)
    texts: dict[int, str] = defaultdict(str)
    finishes = {}
    stream = await ask(
        client,
        n=3,
        temperature=0,
        tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason
    assert dict(texts) == {c.index: c.message.content for c in whole.choices}
    assert finishes == {c.index: c.finish_reason for c in whole.choices}
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_top_logprobs_are_sorted_and_contain_the_greedy_token(client: AsyncOpenAI) -> None:
    answer = await ask(client, logprobs=True, top_logprobs=3, temperature=0, tokens=12)
    for entry in answer.choices[0].logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.token == entry.top_logprobs[0].token


async def test_streamed_top_logprobs_are_those_of_their_positions(client: AsyncOpenAI) -> None:
    options: Any = {"logprobs": True, "top_logprobs": 2, "temperature": 0, "tokens": 12}
    whole = await ask(client, **options)
    streamed: list[Any] = []
    async for chunk in await ask(client, **options, stream=True):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    first = whole.choices[0].logprobs.content
    assert [[t.token for t in e.top_logprobs] for e in streamed] == [
        [t.token for t in e.top_logprobs] for e in first
    ]


async def test_top_logprobs_without_logprobs_are_refused(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="top_logprobs=2 needs logprobs=true"):
        await ask(client, top_logprobs=2)


RESPONSE_TOOL: Any = {"type": "function", "name": "look", "parameters": KINDS, "strict": True}


async def test_a_response_is_the_chat_in_the_other_format(client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "be brief"}, *HI],
        seed=3,
        max_completion_tokens=9,
    )
    response = await client.responses.create(
        model=MODEL,
        instructions="be brief",
        input="hi",
        max_output_tokens=9,
        extra_body={"seed": 3},
    )
    assert response.output_text == chat.choices[0].message.content
    is_cut = chat.choices[0].finish_reason == "length"
    assert response.status == ("incomplete" if is_cut else "completed")
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]


async def test_a_tool_loop_over_responses_has_the_prompt_of_the_chat(client: AsyncOpenAI) -> None:
    """The second request sends the call back with its output."""
    first = await client.responses.create(
        model=MODEL, input="hi", tools=[RESPONSE_TOOL], tool_choice="required"
    )
    (call,) = first.output
    assert call.type == "function_call"
    check_arguments(call.arguments)
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "a wren"},
    ]
    second = await client.responses.create(
        model=MODEL, input=items, tools=[RESPONSE_TOOL], max_output_tokens=5
    )
    chat = await client.chat.completions.create(
        model=MODEL,
        messages=[
            *HI,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": "look", "arguments": call.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "a wren"},
        ],
        tools=[tool("look")],
        max_completion_tokens=5,
    )
    assert second.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]


async def test_streamed_responses_end_with_the_whole_response(client: AsyncOpenAI) -> None:
    async with client.responses.stream(
        model=MODEL, input="hi", tools=[RESPONSE_TOOL], tool_choice="required"
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.done" in kinds
    assert final.output[0].type == "function_call"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id='resp_1' is not supported"),
        ({"tools": [{"type": "web_search"}]}, "only tools of type function run here"),
        ({"background": True}, "background=True is not supported"),
        ({"input": [{"type": "computer_call"}]}, "type 'computer_call', which is not supported"),
    ],
)
async def test_what_the_responses_api_does_not_have_here_is_refused_by_name(
    client: AsyncOpenAI, options: Any, message: str
) -> None:
    with pytest.raises(BadRequestError, match=message):
        await client.responses.create(**({"model": MODEL, "input": "hi"} | options))


AGENTS = {
    "litellm": """
import litellm, os, sys
answer = litellm.completion(model="openai/tiny", api_base=sys.argv[1], api_key="none", max_tokens=200,
    messages=[{"role": "user", "content": "hi"}], tools=[TOOL], tool_choice="required")
print(answer.choices[0].message.tool_calls[0].function.name)
text = "".join(c.choices[0].delta.content or "" for c in litellm.completion(model="openai/tiny",
    api_base=sys.argv[1], api_key="none", messages=[{"role": "user", "content": "hi"}], max_tokens=9,
    stream=True))
print(len(text) > 0)
""",
    "agents": """
import asyncio, sys
from openai import AsyncOpenAI
from agents import (Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner,
    function_tool, set_tracing_disabled)
from typing import Literal
set_tracing_disabled(True)
seen = []
@function_tool
def look(kind: Literal["heron", "wren"]) -> str:
    "Look."
    seen.append(kind)
    return "seen"
async def main():
    for model in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        client = AsyncOpenAI(base_url=sys.argv[1], api_key="none")
        agent = Agent(name="a", instructions="be brief", tools=[look],
            model=model(model="tiny", openai_client=client),
            model_settings=ModelSettings(tool_choice="required", max_tokens=100))
        await Runner.run(agent, "hi", max_turns=3)
    print(len(seen))
asyncio.run(main())
""",
}


def is_installed(name: str, folder: str) -> bool:
    return find_spec(name) is not None or Path(folder, name).is_dir()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "expected"), [("litellm", ["look", "True"]), ("agents", ["2"])])
async def test_unmodified_programs_of_other_libraries_run(
    name: str, expected: list[str], tmp_path: Path
) -> None:
    """Needs `pip install litellm openai-agents`, or SKYFLEET_AGENTS naming a folder that holds them."""
    extra = os.environ.get("SKYFLEET_AGENTS", "")
    program = tmp_path / "program.py"
    program.write_text(f"TOOL = {tool('look')!r}\n".replace("true", "True") + AGENTS[name])
    environment = os.environ | {"PYTHONPATH": extra, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    if not is_installed(name, extra):
        pytest.skip(f"{name} is not installed: pip install litellm openai-agents")
    policy_model = tiny_policy()
    async with serving(policy_model.app(policy_model.engine())) as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(program), f"{url}/v1",
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    assert output.decode().split() == expected
