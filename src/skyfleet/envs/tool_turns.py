"""Execute the tool calls of an agent's message and report errors to the agent."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.envs.env import DONE, Step

SYSTEM = f"Call a tool each turn. Say {DONE} when finished."
"""The system message of environments that have none of their own."""

SUBMIT_NAME = "submit_final_answer"
SUBMIT = ToolSpec(
    name=SUBMIT_NAME,
    description="Give the answer and finish.",
    parameters={
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
    },
)
"""Added to an environment's tools if the task asks a question."""

RESPOND_NAME = "respond"
"""The name, from tau-bench, by which a reference solution records a message to the user: a call with
the argument `content`. An agent sends the text itself."""

# How calls start in GLM's, Qwen3-Coder's and pythonic formats.
_OTHER_FORMAT = re.compile(
    r"<arg_(?:key|value)>|<function=|<\|(?:tool_call|python)_start\|>|\A\[\s*[\w.]+\("
)
_DONE = re.compile(rf"{re.escape(DONE)}|\[done\]", re.IGNORECASE)


async def run_tool_calls(action: Message, answer: Callable[[ToolCall], Awaitable[Step]]) -> Step:
    """Answer the calls in order until one ends the episode, and combine their steps.

    A turn without a call, or with a malformed one, gets an error message.
    """
    replies: list[Message] = []
    info: dict[str, float] = {}
    success: bool | None = None
    reward, done = 0.0, False
    for call in action.tool_calls:
        step = await answer(call)
        replies.extend(step.messages)
        info.update(step.info)
        reward, done = reward + step.reward, step.done
        success = success if step.success is None else step.success
        if done:
            break
    done = done or says_done(action)
    if not done and action.malformed_calls:
        is_other_format = any(map(_OTHER_FORMAT.search, action.malformed_calls))
        problem = "cannot be read" if is_other_format else "is not valid JSON"
        text = f"Error: the tool call {problem}; give a name and arguments."
        replies.append(Message(role="user", content=text))
    elif not done and not replies:
        text = f"Error: no tool call. Call a tool, or say {DONE} when finished."
        replies.append(Message(role="user", content=text))
    return Step(messages=tuple(replies), done=done, reward=reward, info=info, success=success)


def says_done(action: Message) -> bool:
    """Whether the message's text, without its reasoning, declares that the agent is done."""
    return _DONE.search(action.text) is not None
