"""The answer of a tool environment to a turn without a valid call."""

from __future__ import annotations

import pytest

from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.tool_calls.formats import get_parser
from skyfleet.envs.env import Step
from skyfleet.envs.tool_turns import run_tool_calls


async def answer(call: ToolCall) -> Step:
    raise AssertionError(f"{call.name} is not to be called")


@pytest.mark.parametrize(
    ("parser", "output", "why"),
    [
        ("hermes", '<tool_call>{"name": "stop", </tool_call>', "is not valid JSON"),
        ("mistral", '[TOOL_CALLS][{"name": "stop"}]', "is not valid JSON"),
        ("glm", "<tool_call>stop\n<arg_key>now</arg_key>\n</tool_call>", "cannot be read"),
        ("qwen3_coder", "<tool_call>\n<function=stop\n</tool_call>", "cannot be read"),
        ("pythonic", "[stop(now=later())]", "cannot be read"),
        ("pythonic", "<|tool_call_start|>stop<|tool_call_end|>", "cannot be read"),
    ],
)
async def test_only_json_calls_get_the_error_about_invalid_json(
    parser: str, output: str, why: str
) -> None:
    action: Message = get_parser(parser)(output).message
    assert action.malformed_calls
    step = await run_tool_calls(action, answer)
    assert [message.text for message in step.messages] == [
        f"Error: the tool call {why}; give a name and arguments."
    ]
