"""SafeEnv: a safe that opens at one number and says whether a wrong one is too low or too high."""

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
        self._is_there = self._is_open = False

    async def reset(self) -> Observation:
        self._is_there, self._is_open = True, False
        return Observation(
            messages=(Message(role="user", content=self._prompt),), tools=(TURN_DIAL,)
        )

    async def step(self, action: Message) -> Step:
        """Every call is answered; what the agent does wrong is said, not raised."""
        if not self._is_there:
            raise EnvError("the safe is not there; call reset first")
        if not action.tool_calls:
            return Step(messages=(Message(role="user", content="Turn the dial."),))
        (call, *_) = action.tool_calls
        number = call.arguments.get("number")
        if call.name != TURN_DIAL.name or not isinstance(number, int):
            said, wrong = "Error: call turn_dial with a number.", True
        else:
            said, wrong = self._click(number), False
        reply = Message(role="tool", content=said, tool_call_id=call.id, is_error=wrong)
        return Step(messages=(reply,), done=self._is_open)

    async def grade(self) -> Grade:
        return Grade(reward=float(self._is_open), success=self._is_open)

    async def close(self) -> None:
        self._is_there = False

    def _click(self, number: int) -> str:
        self._is_open = number == self._secret
        if self._is_open:
            return "The safe opens."
        return "Too low." if number < self._secret else "Too high."


async def open_env(task: Task) -> SafeEnv:
    """What `environment.env_class` names."""
    return SafeEnv(task)
