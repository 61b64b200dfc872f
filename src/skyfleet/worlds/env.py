"""The environment of one built-in world task: one episode on its own database, in this process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from functools import lru_cache, partial

from skyfleet.chat.message import Message, ToolCall
from skyfleet.config.environment import Verifier
from skyfleet.envs.env import Observation, Step
from skyfleet.envs.tool_turns import SYSTEM, run_tool_calls
from skyfleet.envs.tools import Tool, ToolError
from skyfleet.envs.verifiers.conversation import conversation_json
from skyfleet.envs.verifiers.grading import grade_state
from skyfleet.errors import EnvError, VerifierError
from skyfleet.tasks.task import Grade, Task
from skyfleet.worlds.toolkit import App, show
from skyfleet.worlds.world import World

_RULES = Message(role="system", content=SYSTEM)
_DATA_KEY = re.compile(r"seed-(\d{1,9})")

# User and date are part of the user message, not of the system prompt: all tasks of a world then
# share a token prefix, which engine and learner compute once.
_INSTRUCTION = """\
You help {user} in {world}. Today is {weekday}, {today}.
{prompt}"""


def submit_final_answer(app: App, answer: str) -> str:
    """Give the answer and finish."""
    return answer


_SUBMIT = Tool.of(submit_final_answer)


class WorldEnv:
    def __init__(
        self,
        world: World,
        task: Task,
        *,
        partial_credit: bool = False,
        verifier: Verifier | None = None,
    ) -> None:
        """`partial_credit`: the reward of a failed task is the share of its checks that passed."""
        self._world, self._partial_credit = world, partial_credit
        self._verifier = verifier or Verifier()
        self._task = task
        expects_answer = _SUBMIT.spec.name in task.prompt
        self._toolkit = world.toolkit.with_tool(_SUBMIT) if expects_answer else world.toolkit
        self._data_seed = _data_seed(task)
        self._app: App | None = None
        self._done = False
        self._answer: str | None = None
        self._messages: list[Message] = []

    async def reset(self) -> Observation:
        await self.close()
        self._done, self._answer = False, None
        self._app = self._world.open(self._data_seed, self._task.env_variables)
        instruction = _INSTRUCTION.format(
            user=self._app.user,
            world=self._world.name,
            weekday=format_weekday(self._app.current_date),
            today=self._app.current_date,
            prompt=self._task.prompt,
        )
        messages = (_RULES, Message(role="user", content=instruction))
        self._messages = list(messages)
        return Observation(messages=messages, tools=self._toolkit.specs)

    async def step(self, action: Message) -> Step:
        if self._done:
            raise EnvError(f"task {self._task.key}: step() was called after done; open a new env")
        step = await run_tool_calls(action, partial(self._call_tool, self._open_app))
        self._done = step.done
        self._messages += (action, *step.messages)
        return step

    async def grade(self) -> Grade:
        code = self._task.verifier_code
        if code is None:
            raise VerifierError(
                f"task {self._task.key}: verifier_code is None; add one to the task"
            )
        seed = self._world.image(self._data_seed)
        return await grade_state(
            code,
            seed,
            self._open_app.db.connection,
            self._answer,
            # Serialized only on demand: it is as long as the episode, and few verifiers read it.
            conversation=conversation_json(self._conversation())
            if "conversation" in code
            else None,
            partial_credit=self._partial_credit,
            timeout_seconds=self._verifier.timeout_seconds,
            allow_unconfined=self._verifier.allow_unconfined,
        )

    async def close(self) -> None:
        if self._app is not None:
            self._app.db.close()
            self._app = None

    def _conversation(self) -> Sequence[Message]:
        """The messages that the verifier may read."""
        return self._messages

    @property
    def _open_app(self) -> App:
        if self._app is None:
            raise EnvError(f"task {self._task.key}: the env is not open; call reset() first")
        return self._app

    async def _call_tool(self, app: App, call: ToolCall) -> Step:
        try:
            result = self._toolkit.call(app, call.name, call.arguments)
        except ToolError as error:
            text = f"Error: {error}"
            reply = Message(role="tool", content=text, tool_call_id=call.id, is_error=True)
            return Step(messages=(reply,))
        submitted = call.name == _SUBMIT.spec.name
        if submitted:
            self._answer = str(result)
        reply = Message(role="tool", content=show(result), tool_call_id=call.id)
        return Step(messages=(reply,), done=submitted)


@lru_cache
def format_weekday(iso_date: str) -> str:
    return date.fromisoformat(iso_date).strftime("%A")


def _data_seed(task: Task) -> int:
    match = _DATA_KEY.fullmatch(task.data_key or "")
    if match is None:
        raise EnvError(f"task {task.key}: data_key={task.data_key!r}; write seed-<number>")
    return int(match[1])
