"""The environment of a conversational task: tools for the agent, a simulated user to talk to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from skyfleet.chat.message import Message
from skyfleet.config.environment import Verifier
from skyfleet.envs.env import DONE, Observation, Step
from skyfleet.envs.tool_turns import run_tool_calls, says_done
from skyfleet.envs.users.scenario import Scenario, read_scenario
from skyfleet.envs.users.scripted import ScriptedUser
from skyfleet.envs.users.user import User, UserFactory, UserFailedError, UserFailure, UserTurn
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Grade, Task
from skyfleet.worlds.conversations.world import ConversationWorld
from skyfleet.worlds.env import WorldEnv, format_weekday

_DONE_MARK = re.compile(rf"{re.escape(DONE)}|\[done\]", re.IGNORECASE)
_EMPTY = Message(
    role="user",
    content=f"Error: no message. Write to the customer, call a tool, or say {DONE}.",
)
_sessions = count()


def make_scripted_user(scenario: Scenario, session: str) -> User:
    return ScriptedUser(scenario)


class ConversationEnv(WorldEnv):
    def __init__(
        self,
        world: ConversationWorld,
        task: Task,
        *,
        make_user: UserFactory = make_scripted_user,
        partial_credit: bool = False,
        verifier: Verifier | None = None,
    ) -> None:
        super().__init__(world, task, partial_credit=partial_credit, verifier=verifier)
        self._policy, self._make_user = world.policy, make_user
        self._user: User | None = None
        self._failure: UserFailure | None = None
        self._opening_info: dict[str, float] = {}
        """What the user's first message took; the first step reports it."""

    async def reset(self) -> Observation:
        await self.close()
        self._done, self._failure = False, None
        self._app = self._world.open(self._data_seed, self._task.env_variables)
        # Unique among all attempts, so that users of the same task differ.
        session = f"user/{self._task.key}/{next(_sessions)}"
        self._user = self._make_user(read_scenario(self._task), session)
        first = await self._user.open()
        if first.failure is not None:
            raise UserFailedError.of(first.failure)
        self._opening_info = first.info
        today = self._app.current_date
        policy = f"{self._policy}\n\nToday is {format_weekday(today)}, {today}."
        messages = (
            Message(role="system", content=policy),
            Message(role="user", content=first.text),
        )
        self._messages = [messages[1]]
        return Observation(messages=messages, tools=self._toolkit.specs)

    async def step(self, action: Message) -> Step:
        if self._done:
            raise EnvError(f"task {self._task.key}: step() was called after done; open a new env")
        if action.tool_calls or action.malformed_calls:
            step = await run_tool_calls(action, partial(self._call_tool, self._open_app))
        else:
            step = await self._answer_message(action)
        self._done = step.done
        if self._opening_info:
            info = {name: step.info.get(name, 0) + n for name, n in self._opening_info.items()}
            step, self._opening_info = replace(step, info={**step.info, **info}), {}
        return step

    async def grade(self) -> Grade:
        if self._failure is not None:
            raise UserFailedError.of(self._failure)
        return await super().grade()

    async def close(self) -> None:
        await super().close()
        if self._user is not None:
            user, self._user = self._user, None
            await user.aclose()

    @property
    def replies(self) -> list[str]:
        """What the agent wrote to the user."""
        return [message.text for message in self._messages if message.role == "assistant"]

    def _conversation(self) -> Sequence[Message]:
        return self._messages

    async def _answer_message(self, action: Message) -> Step:
        text = _DONE_MARK.sub("", action.text).strip()
        if text:
            self._messages.append(Message(role="assistant", content=text))
        if says_done(action):
            return Step(done=True)
        if not text:
            return Step(messages=(_EMPTY,))
        turn = await self._open_user.reply(text)
        return self._make_step(turn)

    def _make_step(self, turn: UserTurn) -> Step:
        self._failure = turn.failure
        if not turn.text:
            return Step(done=turn.is_done, info=turn.info)
        reply = Message(role="user", content=turn.text)
        self._messages.append(reply)
        return Step(messages=(reply,), done=turn.is_done, info=turn.info)

    @property
    def _open_user(self) -> User:
        if self._user is None:
            raise EnvError(f"task {self._task.key}: the env is not open; call reset() first")
        return self._user
