"""MCP servers as envs: any of them, over streamable HTTP or stdio.

Every episode has a session of its own, because what a server remembers it remembers by session;
only the certificates are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from skyfleet.chat.message import Message, Part, ToolCall
from skyfleet.envs.content_blocks import DONE_META, content_of, text_of
from skyfleet.envs.env import EnvFactory, Observation, Step
from skyfleet.envs.mcp.grading import Grader, Played
from skyfleet.envs.mcp.session import RefusedError, Session, over_http, over_stdio
from skyfleet.envs.turns import SYSTEM, take_turn
from skyfleet.errors import ConfigError, EnvError, VerifierError
from skyfleet.tasks.task import Grade, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPSettings:
    """One of `url` and `command`; `{task_key}` in either is the task's."""

    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    """Starts a server on stdio, one an episode."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For the command, which inherits HOME, PATH and the like, and no secrets."""
    call_timeout_seconds: float = 60
    max_result_characters: int = 20_000
    """A tool's longer result is cut, with a note."""
    grade: Grader

    def __post_init__(self) -> None:
        if (self.url is None) == (not self.command):
            raise ConfigError(f"url={self.url!r}, command={self.command!r}; give one of them")

    def session(self, task: Task) -> Session:
        if self.url is not None:
            name = self.url.replace("{task_key}", quote(task.key, safe=""))
            transport = over_http(name, self.headers)
        else:
            words = [word.replace("{task_key}", task.key) for word in self.command]
            name, transport = " ".join(words), over_stdio(words, self.environment)
        return Session(name, transport, call_timeout_seconds=self.call_timeout_seconds)


def mcp_factory(settings: MCPSettings) -> EnvFactory:
    async def open_env(task: Task) -> MCPEnv:
        return MCPEnv(task, settings)

    return open_env


class MCPEnv:
    def __init__(self, task: Task, settings: MCPSettings) -> None:
        self._task, self._settings = task, settings
        self._session: Session | None = None
        self._said: list[Message] = []

    async def reset(self) -> Observation:
        await self.close()
        self._session = self._settings.session(self._task)
        await self._session.open()
        messages = _opening(self._task, self._session.instructions)
        self._said = list(messages)
        return Observation(messages=messages, tools=await self._session.tools())

    async def step(self, action: Message) -> Step:
        step = await take_turn(action, self._answer)
        self._said += (action, *step.messages)
        return step

    async def grade(self) -> Grade | None:
        played = Played(task=self._task, messages=tuple(self._said), session=self._opened)
        try:
            return await self._settings.grade(played)
        except EnvError as error:
            raise VerifierError(str(error)) from error

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def _opened(self) -> Session:
        if self._session is None:
            raise EnvError(f"task {self._task.key}: the env is not open; call reset first")
        return self._session

    async def _answer(self, call: ToolCall) -> Step:
        limit, done = self._settings.max_result_characters, False
        content: str | tuple[Part, ...]
        try:
            result = await self._opened.call(call.name, call.arguments)
        except RefusedError as error:
            content, is_error = text_of(f"Error: {error}", max_characters=limit), True
        else:
            done = bool((result.meta or {}).get(DONE_META))
            blocks = [block.model_dump(mode="json") for block in result.content]
            content, is_error = content_of(blocks, max_characters=limit), result.isError
            if not blocks and result.structuredContent is not None:
                content = text_of(result.structuredContent, max_characters=limit)
        reply = Message(role="tool", content=content, tool_call_id=call.id, is_error=is_error)
        return Step(messages=(reply,), done=done)


def _opening(task: Task, instructions: str) -> tuple[Message, ...]:
    """A server that knows the task says it in its instructions; others give advice there."""
    wish, system = task.prompt, SYSTEM
    if wish in instructions:
        wish = instructions
    elif instructions:
        system = f"{SYSTEM}\n{instructions}"
    return Message(role="system", content=system), Message(role="user", content=wish)
