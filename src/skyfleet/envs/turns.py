"""Turns: what an env of tools does with the agent's message, whoever answers the calls."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.envs.env import DONE, Step

SYSTEM = f"Call a tool each turn. Say {DONE} when finished."
"""What the agent is told where the env has no words of its own."""

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
"""What an env adds to its tools where a task asks a question."""

# How GLM, Qwen3-Coder and models that call in Python begin to.
_NO_JSON = re.compile(
    r"<arg_(?:key|value)>|<function=|<\|(?:tool_call|python)_start\|>|\A\[\s*[\w.]+\("
)
_DONE = re.compile(rf"{re.escape(DONE)}|\[done\]", re.IGNORECASE)


async def take_turn(action: Message, answer: Callable[[ToolCall], Awaitable[Step]]) -> Step:
    """Answer the calls in order until one ends the episode; a turn without a call is told so."""
    replies: list[Message] = []
    reward, done = 0.0, False
    for call in action.tool_calls:
        step = await answer(call)
        replies.extend(step.messages)
        reward, done = reward + step.reward, step.done
        if done:
            break
    done = done or says_done(action)
    if not done and action.malformed_calls:
        other = any(map(_NO_JSON.search, action.malformed_calls))
        why = "cannot be read" if other else "is not valid JSON"
        text = f"Error: the tool call {why}; give a name and arguments."
        replies.append(Message(role="user", content=text))
    elif not done and not replies:
        text = f"Error: no tool call. Call a tool, or say {DONE} when finished."
        replies.append(Message(role="user", content=text))
    return Step(messages=tuple(replies), done=done, reward=reward)


def says_done(action: Message) -> bool:
    """In what it says aloud: a thought is not said."""
    return _DONE.search(action.text) is not None
