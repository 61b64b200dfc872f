"""MCPEnv: adapter for any MCP server, over streamable HTTP or stdio.

Every episode has a session of its own, because servers keep state per session; only the TLS
context is shared.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from skyfleet.chat.message import Message, Part, ToolCall
from skyfleet.config.environment import Mcp, Verifier
from skyfleet.config.root import RunConfig
from skyfleet.envs.content_blocks import DONE_META, parse_content_blocks, to_text
from skyfleet.envs.env import EnvFactory, Observation, Step
from skyfleet.envs.mcp.grading import FinishedEpisode, Grader, build_grader
from skyfleet.envs.mcp.session import CallRejectedError, Session, over_http, over_stdio
from skyfleet.envs.tool_turns import SYSTEM, run_tool_calls
from skyfleet.errors import ConfigError, EnvError, VerifierError
from skyfleet.tasks.task import Grade, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPSettings:
    """Exactly one of `url` and `command`; `{task_key}` in either is replaced by the task's key."""

    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    command: tuple[str, ...] = ()
    """Starts a server on stdio, one per episode."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the command, which inherits HOME, PATH and the like but no secrets."""
    call_timeout_seconds: float = 60
    max_result_characters: int = 20_000
    """A longer tool result is cut, with a note."""
    grade: Grader

    def __post_init__(self) -> None:
        if (self.url is None) == (not self.command):
            raise ConfigError(f"url={self.url!r}, command={self.command!r}; give one of them")

    @classmethod
    def from_config(cls, section: Mcp, verifier: Verifier | None = None) -> MCPSettings:
        return cls(
            url=section.url,
            command=tuple(section.command),
            headers={name: value.get_secret_value() for name, value in section.headers.items()},
            environment={
                name: value.get_secret_value() for name, value in section.environment.items()
            },
            call_timeout_seconds=section.call_timeout_seconds,
            grade=build_grader(section, verifier),
        )

    def make_session(self, task: Task) -> Session:
        if self.url is not None:
            name = self.url.replace("{task_key}", quote(task.key, safe=""))
            transport = over_http(name, self.headers)
        else:
            words = [word.replace("{task_key}", task.key) for word in self.command]
            name, transport = " ".join(words), over_stdio(words, self.environment)
        return Session(name, transport, call_timeout_seconds=self.call_timeout_seconds)


def build_factory(config: RunConfig) -> EnvFactory:
    environment = config.environment
    return mcp_factory(MCPSettings.from_config(environment.mcp, environment.verifier))


def mcp_factory(settings: MCPSettings) -> Callable[[Task], Awaitable[MCPEnv]]:
    async def open_env(task: Task) -> MCPEnv:
        return MCPEnv(task, settings)

    return open_env


class MCPEnv:
    def __init__(self, task: Task, settings: MCPSettings) -> None:
        self._task, self._settings = task, settings
        self._session: Session | None = None
        self._messages: list[Message] = []

    async def reset(self) -> Observation:
        await self.close()
        self._session = self._settings.make_session(self._task)
        await self._session.open()
        messages = _make_prompt(self._task, self._session.instructions)
        self._messages = list(messages)
        return Observation(messages=messages, tools=await self._session.list_tools())

    async def step(self, action: Message) -> Step:
        step = await run_tool_calls(action, self._answer)
        self._messages += (action, *step.messages)
        return step

    async def grade(self) -> Grade | None:
        episode = FinishedEpisode(
            task=self._task, messages=tuple(self._messages), session=self._open_session
        )
        try:
            return await self._settings.grade(episode)
        except EnvError as error:
            raise VerifierError(str(error)) from error

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def _open_session(self) -> Session:
        if self._session is None:
            raise EnvError(f"task {self._task.key}: the env is not open; call reset first")
        return self._session

    async def _answer(self, call: ToolCall) -> Step:
        limit, done = self._settings.max_result_characters, False
        content: str | tuple[Part, ...]
        try:
            result = await self._open_session.call(call.name, call.arguments)
        except CallRejectedError as error:
            content, is_error = to_text(f"Error: {error}", max_characters=limit), True
        else:
            done = bool((result.meta or {}).get(DONE_META))
            blocks = [block.model_dump(mode="json") for block in result.content]
            content, is_error = parse_content_blocks(blocks, max_characters=limit), result.isError
            if not blocks and result.structuredContent is not None:
                content = to_text(result.structuredContent, max_characters=limit)
        reply = Message(role="tool", content=content, tool_call_id=call.id, is_error=is_error)
        return Step(messages=(reply,), done=done)


def _make_prompt(task: Task, instructions: str) -> tuple[Message, ...]:
    """Instructions that contain the task's prompt replace it; others extend the system message."""
    prompt, system = task.prompt, SYSTEM
    if prompt in instructions:
        prompt = instructions
    elif instructions:
        system = f"{SYSTEM}\n{instructions}"
    return Message(role="system", content=system), Message(role="user", content=prompt)
