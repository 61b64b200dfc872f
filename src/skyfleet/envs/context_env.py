"""ContextEnv: any env with the context tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from skyfleet.chat.message import Message, Text, ToolCall
from skyfleet.envs.context_tools import CONTEXT_TOOLS, Past
from skyfleet.envs.env import Env, EnvFactory, Opening, Step
from skyfleet.envs.turns import says_done
from skyfleet.envs.worlds.toolkit import ToolError
from skyfleet.errors import EnvError
from skyfleet.tasks.grade import Grade
from skyfleet.tasks.task import Task


def with_context_tools(open_env: EnvFactory, *, max_output_chars: int) -> EnvFactory:
    """Opens the same envs with the tools; a longer answer is shown in pages of that length."""

    async def open_both(task: Task) -> ContextEnv:
        return ContextEnv(await open_env(task), page_characters=max_output_chars)

    return open_both


class ContextEnv:
    def __init__(self, env: Env, *, page_characters: int) -> None:
        self._env, self._page_characters = env, page_characters
        self._past = Past(page_characters)

    async def reset(self) -> Opening:
        self._past = Past(self._page_characters)
        opening = await self._env.reset()
        if taken := CONTEXT_TOOLS.keys() & {tool.name for tool in opening.tools}:
            raise EnvError(
                f"the env has {', '.join(sorted(taken))} of its own; "
                "set enable_context_tools=false under environment"
            )
        for message in opening.messages:
            self._note(message)
        return replace(
            opening, tools=(*opening.tools, *(tool.spec for tool in CONTEXT_TOOLS.values()))
        )

    async def step(self, action: Message) -> Step:
        past = self._past
        past.turn += 1
        theirs = tuple(call for call in action.tool_calls if call.name not in CONTEXT_TOOLS)
        passed_on = replace(action, tool_calls=theirs)
        self._note(passed_on)
        own = [self._answer(call) for call in action.tool_calls if call.name in CONTEXT_TOOLS]
        asks = theirs or action.malformed_calls or says_done(action) or not own
        step = await self._env.step(passed_on) if asks else Step()
        for message in step.messages:
            self._note(message)
        shown = iter([self._paged(message) for message in step.messages])
        messages = tuple(_in_order(action.tool_calls, iter(own), shown))
        keep, past.keep_recent_turns = past.keep_recent_turns, None
        past.turns_in_view += 1
        return replace(step, messages=messages, keep_recent_turns=keep)

    async def grade(self) -> Grade | None:
        return await self._env.grade()

    async def close(self) -> None:
        await self._env.close()

    def _answer(self, call: ToolCall) -> Message:
        tool = CONTEXT_TOOLS[call.name]
        try:
            text, is_error = str(tool.function(self._past, **tool.read(call.arguments))), False
        except ToolError as error:
            text, is_error = f"Error: {error}", True
        return Message(role="tool", content=text, tool_call_id=call.id, is_error=is_error)

    def _note(self, message: Message) -> None:
        calls = (
            f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
            for call in message.tool_calls
        )
        text = "\n".join(filter(None, (message.text, *calls, *message.malformed_calls)))
        when = f"turn {self._past.turn}" if self._past.turn else "opening"
        self._past.said.append((f"{when}, {message.role}", text))

    def _paged(self, message: Message) -> Message:
        text = message.text
        if len(text) <= self._page_characters:
            return message
        self._past.outputs.append(text)
        first = self._past.page(1, len(self._past.outputs))
        if isinstance(message.content, str):
            return replace(message, content=first)
        others = (part for part in message.content if not isinstance(part, Text))
        return replace(message, content=(Text(first), *others))


def _in_order(
    calls: Sequence[ToolCall], own: Iterator[Message], theirs: Iterator[Message]
) -> Iterator[Message]:
    """One answer a call, as they were made, then whatever else was said."""
    for call in calls:
        answer = next(own if call.name in CONTEXT_TOOLS else theirs, None)
        if answer is not None:
            yield answer
    yield from theirs
