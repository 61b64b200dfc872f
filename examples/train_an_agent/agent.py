"""An agent written against OpenAI's API, and the line that makes it trainable."""

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


async def open_safe(task: Task, credentials: ApiCredentials) -> float:
    """Return 1.0 once the model finds the number; each guess is answered with too low or too high."""
    secret = task.env_variables["SECRET"]
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    async with AsyncOpenAI(base_url=credentials.base_url, api_key=credentials.key) as client:
        while True:
            response = await client.chat.completions.create(
                model=credentials.model, messages=messages, tools=[TURN_DIAL]
            )
            message = response.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                messages.append({"role": "user", "content": "Turn the dial."})
            for call in message.tool_calls or []:
                result = _turn_dial(call, secret)
                if result == "The safe opens.":
                    return 1.0
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _turn_dial(call: Any, secret: int) -> str:
    number = json.loads(call.function.arguments).get("number")
    if call.function.name != "turn_dial" or not isinstance(number, int):
        return "Error: call turn_dial with a number."
    if number == secret:
        return "The safe opens."
    return "Too low." if number < secret else "Too high."


open_env = agent_env(open_safe, truncated_reward=0.0)
