"""Users with tools, in tau2's dual-control domains: one that does as it is told, and tau2's own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from skyfleet.config.environment import TauSuites
from skyfleet.envs.tau.v2_case import Tau2Case
from skyfleet.envs.tau.v2_package import Tau2
from skyfleet.envs.users.user import STOP, User, UserFailure, UserFailureKind, UserTurn

STOPS = (STOP, "###TRANSFER###", "###OUT-OF-SCOPE###")
"""What tau2's users say to end a conversation."""


def write_request(name: str, arguments: Mapping[str, Any]) -> str:
    """How an agent asks the user to use one of its tools."""
    return f"{name}({json.dumps(dict(arguments)) if arguments else ''})"


def find_requested_calls(
    text: str, tools: Collection[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Find `toggle_data()` and `set_network_mode({"mode": "4g"})` in a message, in order."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\b(\w+)\(\s*", text):
        name, rest = match[1], text[match.end() :]
        if name not in tools:
            continue
        if rest.startswith(")"):
            yield name, {}
        elif rest.startswith("{"):
            try:
                arguments, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                continue
            if rest[end:].lstrip().startswith(")"):
                yield name, arguments


class ObedientUser:
    """Uses its tools when a message asks it to, by their names, and says what they return.

    Any other message goes to the user behind it.
    """

    def __init__(self, user: User, case: Tau2Case, tools: Collection[str]) -> None:
        self._user, self._case, self._tools = user, case, tools

    async def open(self) -> UserTurn:
        return await self._user.open()

    async def reply(self, agent_message: str) -> UserTurn:
        results = [
            f"{name}: {self._case.call_as_user(name, arguments).text}"
            for name, arguments in find_requested_calls(agent_message, self._tools)
        ]
        return (
            UserTurn(text="\n".join(results)) if results else await self._user.reply(agent_message)
        )

    async def aclose(self) -> None:
        await self._user.aclose()


class Tau2PackageUser:
    """tau2's simulator, unmodified. It blocks, so it runs in a thread; what it raises is a failure."""

    def __init__(
        self, package: Tau2, section: TauSuites, case: Tau2Case, task: Any, history: Sequence[Any]
    ) -> None:
        self._package, self._section, self._case, self._task = package, section, case, task
        self._history = list(history)
        self._simulator: Any = None
        self._state: Any = None

    async def open(self) -> UserTurn:
        def open_simulator() -> str:
            environment = self._case.environment
            tools = None
            if environment.user_tools is not None:
                tools = environment.get_user_tools(include=self._task.user_tools) or None
            self._simulator = self._package.user_simulator(
                llm=f"{self._section.user_provider}/{self._section.user_model}",
                instructions=str(self._task.user_scenario),
                tools=tools,
            )
            self._state = self._simulator.get_init_state(message_history=self._history)
            return self._say(self._package.greeting)

        return await self._ask(open_simulator)

    async def reply(self, agent_message: str) -> UserTurn:
        return await self._ask(lambda: self._say(agent_message))

    async def aclose(self) -> None: ...

    def _say(self, text: str) -> str:
        """Send a message, and the results of the user's calls until it says something."""
        classes = self._package.message
        message: Any = classes.AssistantMessage(role="assistant", content=text)
        while True:
            reply, self._state = self._simulator.generate_next_message(message, self._state)
            if not reply.tool_calls:
                return str(reply.content or "")
            results = [
                classes.ToolMessage(
                    id=call.id,
                    role="tool",
                    requestor="user",
                    content=self._case.call_as_user(call.name, call.arguments).text,
                )
                for call in reply.tool_calls
            ]
            message = (
                results[0]
                if len(results) == 1
                else classes.MultiToolMessage(role="tool", tool_messages=results)
            )

    async def _ask(self, ask: Callable[[], str]) -> UserTurn:
        try:
            text = await asyncio.to_thread(ask)
        except Exception as error:  # litellm raises exceptions of many providers
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            failure = UserFailure(kind=UserFailureKind.ENDPOINT, detail=detail)
            return UserTurn(text="", is_done=True, failure=failure)
        return UserTurn(text=text, is_done=any(stop in text for stop in STOPS))
