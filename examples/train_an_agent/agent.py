"""An agent as people write them against OpenAI's API, and the one line that makes it trainable."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from skyfleet.envs.agent_env import ApiCredentials, agent_env
from skyfleet.tasks.task import Task

TURN_DIAL: Any = {
    "type": "function",
    "function": {
        "name": "turn_dial",
        "description": "Turn the dial to a number from 1 to 100.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
        },
    },
}


async def open_safe(task: Task, api: ApiCredentials) -> float:
    """1.0 if the model finds the number, which it is told is too low or too high."""
    secret = task.env_variables["SECRET"]
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    async with AsyncOpenAI(base_url=api.base_url, api_key=api.key) as client:
        while True:
            answer = await client.chat.completions.create(
                model=api.model, messages=messages, tools=[TURN_DIAL]
            )
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                messages.append({"role": "user", "content": "Turn the dial."})
            for call in said.tool_calls or []:
                heard = _click(call, secret)
                if heard == "The safe opens.":
                    return 1.0
                messages.append({"role": "tool", "tool_call_id": call.id, "content": heard})


def _click(call: Any, secret: int) -> str:
    number = json.loads(call.function.arguments).get("number")
    if call.function.name != "turn_dial" or not isinstance(number, int):
        return "Error: call turn_dial with a number."
    if number == secret:
        return "The safe opens."
    return "Too low." if number < secret else "Too high."


play = agent_env(open_safe, truncated_reward=0.0)
