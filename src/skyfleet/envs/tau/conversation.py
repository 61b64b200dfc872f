"""ConversationEnv: an agent, a simulated user, and the tools and the grade of a public package.

One call per turn is made, as in the packages' own loops; text beside a call is not sent. A turn
without a call is a message to the user. The user ends the conversation, or a tool that transfers it,
or an agent whose whole message is `<done>`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.envs.env import DONE, Observation, Step
from skyfleet.envs.tool_turns import RESPOND_NAME, run_tool_calls
from skyfleet.envs.users.user import STOP, User, UserFailedError, UserFailure, UserTurn
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Grade, Task

NOT_CALLED = (
    "Error: only the first tool call of a message is executed; call this tool in a later one."
)
TOO_LARGE = "Error: the expression is too large to calculate"
_CALCULATOR = "calculate"
_POWERS = re.compile(r"\*\*")
_LARGE_POWER = re.compile(r"\*\*[\s(]*\d{4,}|\d{7,}[\s)]*\*\*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    text: str
    is_error: bool = False
    ends: bool = False
    """The tool ends the conversation."""


class Case(Protocol):
    """One episode of a package: its database, its tools and its check."""

    system: str
    writing: frozenset[str]
    """Names of the tools that may change the database."""

    @property
    def tools(self) -> Sequence[ToolSpec]: ...

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool as the package's own loop does; what the tool raises is a result."""
        ...

    def record_agent(self, text: str) -> None:
        """Record a message of the agent to the user."""
        ...

    def record_user(self, text: str) -> None: ...

    def grade(self) -> Grade:
        """Judge the database and the recorded messages as they are."""
        ...

    def state(self) -> str:
        """Return what differs from the initial database, as text."""
        ...


@dataclass(slots=True)
class _Progress:
    has_ended: bool = False
    """By a rule of the package: only then is there anything to grade."""
    is_done: bool = False
    failure: UserFailure | None = None
    opening_info: dict[str, float] = field(default_factory=dict)
    """What the user's first message took; the next step reports it."""


class ConversationEnv:
    def __init__(
        self, task: Task, case: Case, user: User, *, history: Sequence[Message] = ()
    ) -> None:
        """`history` precedes the user's first message, such as the agent's greeting."""
        self._task, self._case, self._user = task, case, user
        self._history = tuple(history)
        self._progress: _Progress | None = None
        self.writing = case.writing | {RESPOND_NAME}

    async def reset(self) -> Observation:
        if self._progress is not None:
            raise EnvError(f"task {self._task.key}: reset after reset; open another env")
        self._progress = _Progress()
        turn = await self._user.open()
        if turn.failure is not None:
            raise UserFailedError.of(turn.failure)
        self._progress.opening_info = turn.info
        self._receive(turn)
        system = Message(role="system", content=self._case.system)
        opening = Message(role="user", content=turn.text)
        return Observation(
            messages=(system, *self._history, opening), tools=tuple(self._case.tools)
        )

    async def step(self, action: Message) -> Step:
        progress = self._open_progress
        if progress.is_done:
            raise EnvError(f"task {self._task.key}: step after done; open another env")
        step = await self._act(action)
        first, progress.opening_info = progress.opening_info, {}
        info = {name: step.info.get(name, 0) + n for name, n in first.items()}
        return replace(step, info={**step.info, **info})

    async def _act(self, action: Message) -> Step:
        progress = self._open_progress
        if action.tool_calls:
            return await self._make_calls(action.tool_calls)
        if action.malformed_calls:
            # Without the text, which may hold anything that was meant as a call.
            return await run_tool_calls(
                Message(role="assistant", malformed_calls=action.malformed_calls), self._refuse
            )
        if action.text.strip() == DONE:
            progress.has_ended = progress.is_done = True
            return Step(done=True)
        return await self._say(action.text)

    async def grade(self) -> Grade:
        progress = self._open_progress
        if progress.failure is not None:
            raise UserFailedError.of(progress.failure)
        if not progress.has_ended:
            return Grade(reward=0.0, success=False, explanation="the conversation has not ended")
        # Comparing databases of several megabytes takes up to a tenth of a second.
        return await asyncio.to_thread(self._case.grade)

    async def close(self) -> None:
        await self._user.aclose()

    def state(self) -> str:
        return self._case.state()

    @property
    def _open_progress(self) -> _Progress:
        if self._progress is None:
            raise EnvError(f"task {self._task.key}: the env is not open; call reset first")
        return self._progress

    async def _make_calls(self, calls: Sequence[ToolCall]) -> Step:
        first, *others = calls
        if first.name == RESPOND_NAME:
            step = await self._say(str(first.arguments.get("content", "")), call_id=first.id)
        else:
            step = self._call(first)
        unmade = (
            Message(role="tool", content=NOT_CALLED, tool_call_id=call.id, is_error=True)
            for call in others
        )
        return Step(messages=(*step.messages, *unmade), done=step.done, info=step.info)

    def _call(self, call: ToolCall) -> Step:
        progress = self._open_progress
        if is_runaway(call):
            result = ToolResult(text=TOO_LARGE, is_error=True)
        else:
            result = self._case.call(call.name, call.arguments)
        progress.has_ended = progress.is_done = result.ends
        message = Message(
            role="tool", content=result.text, tool_call_id=call.id, is_error=result.is_error
        )
        return Step(messages=(message,), done=result.ends)

    async def _say(self, text: str, *, call_id: str | None = None) -> Step:
        """Send a message to the user; a message that was written as a call is answered as one."""
        self._case.record_agent(text)
        turn = await self._user.reply(text)
        self._receive(turn)
        reply = Message(
            role="user" if call_id is None else "tool", content=turn.text, tool_call_id=call_id
        )
        return Step(messages=(reply,), done=self._open_progress.is_done, info=turn.info)

    def _receive(self, turn: UserTurn) -> None:
        progress = self._open_progress
        progress.failure = turn.failure
        progress.is_done = turn.is_done or turn.failure is not None or STOP in turn.text
        progress.has_ended = progress.is_done and turn.failure is None
        self._case.record_user(turn.text)

    async def _refuse(self, call: ToolCall) -> Step:
        raise EnvError(f"task {self._task.key}: {call.name} was not called")


def is_runaway(call: ToolCall) -> bool:
    """Whether a calculator would not return: both packages evaluate `9**9**9` in this process."""
    expression = call.arguments.get("expression")
    return (
        call.name == _CALCULATOR
        and isinstance(expression, str)
        and (len(_POWERS.findall(expression)) > 1 or bool(_LARGE_POWER.search(expression)))
    )
