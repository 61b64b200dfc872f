"""SafeEnv: a safe that opens at one number and reports whether a wrong one is too low or too high."""

from __future__ import annotations

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.envs.env import Observation, Step
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Grade, Task

TURN_DIAL = ToolSpec(
    name="turn_dial",
    description="Turn the dial to a number from 1 to 100.",
    parameters={
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
    },
)


class SafeEnv:
    def __init__(self, task: Task) -> None:
        self._prompt = task.prompt
        self._secret = int(task.env_variables["SECRET"])
        self._is_ready = self._is_open = False

    async def reset(self) -> Observation:
        self._is_ready, self._is_open = True, False
        return Observation(
            messages=(Message(role="user", content=self._prompt),), tools=(TURN_DIAL,)
        )

    async def step(self, action: Message) -> Step:
        """Answer the call; a mistake of the agent is a reply, not an exception."""
        if not self._is_ready:
            raise EnvError("the env is not open; call reset first")
        if not action.tool_calls:
            return Step(messages=(Message(role="user", content="Turn the dial."),))
        (call, *_) = action.tool_calls
        number = call.arguments.get("number")
        if call.name != TURN_DIAL.name or not isinstance(number, int):
            text, is_error = "Error: call turn_dial with a number.", True
        else:
            text, is_error = self._click(number), False
        reply = Message(role="tool", content=text, tool_call_id=call.id, is_error=is_error)
        return Step(messages=(reply,), done=self._is_open)

    async def grade(self) -> Grade:
        return Grade(reward=float(self._is_open), success=self._is_open)

    async def close(self) -> None:
        self._is_ready = False

    def _click(self, number: int) -> str:
        self._is_open = number == self._secret
        if self._is_open:
            return "The safe opens."
        return "Too low." if number < self._secret else "Too high."


async def open_env(task: Task) -> SafeEnv:
    """The function that `environment.env_class` names."""
    return SafeEnv(task)
