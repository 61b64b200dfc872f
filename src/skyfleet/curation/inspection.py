"""Environments for validation: their state can be compared, and their writing tools are known."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from skyfleet.chat.message import Message
from skyfleet.config.environment import Verifier
from skyfleet.config.root import RunConfig
from skyfleet.envs.env import Env, EnvFactory, Observation, Step, close_env, grade_env
from skyfleet.envs.registry import env_factory
from skyfleet.envs.tool_turns import RESPOND_NAME, SUBMIT_NAME
from skyfleet.envs.users.factory import build_user_factory
from skyfleet.envs.users.user import UserFactory
from skyfleet.envs.verifiers.replies import RequiredReplies
from skyfleet.tasks.task import Grade, Task
from skyfleet.worlds.catalog import get_world
from skyfleet.worlds.conversations.dialogue import REPLIES_COLUMN
from skyfleet.worlds.conversations.env import ConversationEnv, make_scripted_user
from skyfleet.worlds.conversations.world import ConversationWorld
from skyfleet.worlds.env import WorldEnv
from skyfleet.worlds.world import World


@runtime_checkable
class Inspectable(Protocol):
    writing: frozenset[str]
    """Names of the tools that may change the state."""

    def state(self) -> str:
        """Return the state as text, including the submitted answer; equal texts are equal states."""
        ...


class InspectableWorldEnv(WorldEnv):
    def __init__(self, world: World, task: Task, *, verifier: Verifier | None = None) -> None:
        super().__init__(world, task, verifier=verifier)
        self.writing = world.toolkit.writing | {SUBMIT_NAME}

    def state(self) -> str:
        rows = "\n".join(self._open_app.db.connection.iterdump())
        return f"{rows}\n{self._answer!r}"


class InspectableConversationEnv(ConversationEnv):
    def __init__(
        self,
        world: ConversationWorld,
        task: Task,
        *,
        make_user: UserFactory,
        verifier: Verifier | None = None,
    ) -> None:
        super().__init__(world, task, make_user=make_user, verifier=verifier)
        self.writing = world.toolkit.writing | {RESPOND_NAME}
        self._required = RequiredReplies(**task.metadata.get(REPLIES_COLUMN, {}))

    def state(self) -> str:
        """Other wordings that state the same are the same state."""
        rows = "\n".join(self._open_app.db.connection.iterdump())
        return f"{rows}\n{self._required.find_stated(self.replies)}"


class RecordingEnv:
    """Wraps an env and records its state before and after grading; None if not inspectable."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._steps: list[Step] = []
        self.writing = env.writing if isinstance(env, Inspectable) else None
        self.before: str | None = None
        """The state before grading."""
        self.after: str | None = None

    async def reset(self) -> Observation:
        return await self._env.reset()

    async def step(self, action: Message) -> Step:
        self._steps.append(await self._env.step(action))
        return self._steps[-1]

    async def grade(self) -> Grade | None:
        self.before = self._state()
        grade = await grade_env(self._env, self._steps)
        self.after = self._state()
        return grade

    async def close(self) -> None:
        await close_env(self._env)

    def _state(self) -> str | None:
        return self._env.state() if isinstance(self._env, Inspectable) else None


def build_inspectable_factory(config: RunConfig) -> EnvFactory:
    """As `env_factory`, except that built-in worlds are inspectable."""
    open_env = env_factory(config)
    environment = config.environment
    make_user = build_user_factory(config)

    async def open_inspectable_env(task: Task) -> Env:
        name = environment.env_classes.get(task.env_key) or task.env_class
        if (name or environment.env_class) == "world":
            return await open_inspectable(task, verifier=environment.verifier, make_user=make_user)
        return await open_env(task)

    return open_inspectable_env


async def open_inspectable(
    task: Task,
    *,
    verifier: Verifier | None = None,
    make_user: UserFactory = make_scripted_user,
) -> InspectableWorldEnv | InspectableConversationEnv:
    world = get_world(task.env_key)
    if isinstance(world, ConversationWorld):
        return InspectableConversationEnv(world, task, make_user=make_user, verifier=verifier)
    return InspectableWorldEnv(world, task, verifier=verifier)
