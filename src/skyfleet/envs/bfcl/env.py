"""BfclEnv: one test case of BFCL. Of a single turn the first message is the answer; of several, a
message without a call ends a turn. The package executes the calls and its checker decides."""

from __future__ import annotations

import asyncio
import keyword
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.config.root import RunConfig
from skyfleet.envs.bfcl.package import MODEL, Entry, load_bfcl, load_category
from skyfleet.envs.bfcl.tasks import make_tool_specs
from skyfleet.envs.env import EnvFactory, Observation, Step
from skyfleet.envs.tool_turns import RESPOND_NAME
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Grade, Task

_episodes = count()


def build_factory(config: RunConfig) -> EnvFactory:
    load_bfcl()
    return open_bfcl


async def open_bfcl(task: Task) -> BfclEnv:
    """Open the environment of a task of `bfcl_tasks`."""
    category, key = (str(task.metadata.get(name)) for name in ("category", "test_id"))
    entries = load_category(category)
    if key not in entries:
        raise EnvError(
            f"task {task.key}: metadata.test_id={key!r} is no test of bfcl's {category}; list the tasks "
            "again with this version of bfcl-eval"
        )
    return BfclEnv(category, entries[key])


class BfclEnv:
    def __init__(self, category: str, entry: Entry) -> None:
        self._category, self._entry = category, entry
        self._tools = make_tool_specs(entry.shown["function"])
        self._history: list[Message] = []
        self._turns: list[list[Sequence[ToolCall]]] = [[]]
        """Of each turn the messages with calls."""
        self._calls: Sequence[ToolCall] | None = None
        """Of a single turn; None before it."""
        self._is_complete = False
        # The package keeps the instances that calls change in a module, by the model's name.
        self._instances = f"{MODEL}_{next(_episodes)}"

    async def reset(self) -> Observation:
        self._history = _read_messages(self._entry.shown["question"][0])
        return Observation(messages=tuple(self._history), tools=self._tools)

    async def step(self, action: Message) -> Step:
        self._history.append(action)
        is_message = [call.name for call in action.tool_calls] == [RESPOND_NAME]
        if not self._category.startswith("multi_turn"):
            self._calls = () if is_message else action.tool_calls
            self._is_complete = True
            return Step(done=True)
        if action.tool_calls and not is_message:
            return await self._execute(action.tool_calls)
        return self._start_turn()

    async def grade(self) -> Grade:
        if not self._is_complete:
            reason = "the conversation has not ended"
            return Grade(reward=0.0, success=False, explanation=reason)
        found = await asyncio.to_thread(self._check)
        passed = bool(found["valid"])
        kind = found.get("error_type", "")
        reason = "" if passed else f"{kind} {found.get('error') or found.get('error_message', '')}"
        return Grade(reward=float(passed), success=passed, explanation=reason.strip())

    async def close(self) -> None:
        instances = vars(load_bfcl().turns)
        for name in [one for one in instances if one.startswith(f"{self._instances}_")]:
            del instances[name]

    async def _execute(self, calls: Sequence[ToolCall]) -> Step:
        steps = self._turns[-1]
        steps.append(calls)
        if len(steps) > load_bfcl().max_steps:
            return Step(done=True)
        replies = [
            Message(
                role="tool",
                content=f"Error during execution: {error}"
                if (error := find_call_error(call, self._tools))
                else await asyncio.to_thread(self._run, call),
                tool_call_id=call.id,
            )
            for call in calls
        ]
        self._history += replies
        return Step(messages=tuple(replies))

    def _start_turn(self) -> Step:
        """Say the user's next message, if there is one."""
        number = len(self._turns)
        questions = self._entry.shown["question"]
        if number == len(questions):
            self._is_complete = True
            return Step(done=True)
        self._turns.append([])
        missing = self._entry.shown.get("missed_function", {}).get(str(number))
        if not missing:
            messages = _read_messages(questions[number])
            self._history += messages
            return Step(messages=tuple(messages))
        self._tools += make_tool_specs(missing)
        prompt = load_bfcl().more_functions_prompt
        messages = _read_messages(questions[number]) or [Message(role="user", content=prompt)]
        self._history += messages
        opening = Observation(messages=tuple(self._history), tools=self._tools)
        return Step(messages=tuple(messages), opening=opening)

    def _run(self, call: ToolCall) -> str:
        entry = self._entry.checked
        results, _ = load_bfcl().turns.execute_multi_turn_func_call(
            func_call_list=[write_call(call)],
            initial_config=entry["initial_config"],
            involved_classes=entry["involved_classes"],
            model_name=self._instances,
            test_entry_id=entry["id"],
            long_context="long_context" in self._category,
        )
        return str(results[0])

    def _check(self) -> Mapping[str, Any]:
        bfcl, entry = load_bfcl(), self._entry
        if self._category.startswith("multi_turn"):
            # Of the functions of later turns too, which a reference calls before they are announced.
            turns = [
                [
                    [write_call(call) for call in step if not find_call_error(call, self._tools)]
                    for step in turn
                ]
                for turn in self._turns
            ]
            found: Mapping[str, Any] = bfcl.check_turns(
                turns, entry.answer, entry.checked, self._category, self._instances
            )
            return found
        calls = [{call.name: dict(call.arguments)} for call in self._calls or ()]
        if "relevance" in self._category:
            wants_call = "irrelevance" not in self._category
            return {"valid": bool(calls) == wants_call, "error_type": "call made, or none made"}
        language = next(
            (one for one in bfcl.languages if self._category.endswith(f"_{one.value}")),
            bfcl.languages.PYTHON,
        )
        if not calls:
            return {"valid": False, "error_type": "ast_decoder:decoder_wrong_output_format"}
        try:
            checked: Mapping[str, Any] = bfcl.check_calls(
                entry.checked["function"], calls, entry.answer, language, self._category, MODEL
            )
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            # Its converters of Java's and JavaScript's values expect texts only.
            return {"valid": False, "error_type": "checker", "error": str(error)}
        return checked


def find_call_error(call: ToolCall, tools: Sequence[ToolSpec]) -> str | None:
    """Why a call must not be written: the package evaluates any text, in this process."""
    tool = next((one for one in tools if one.name == call.name), None)
    if tool is None or not _is_name(call.name):
        return f"name {call.name!r} is not defined"
    known = tool.parameters.get("properties") or {}
    for name in call.arguments:
        if name not in known or not _is_name(name):
            return f"{call.name}() got an unexpected keyword argument {name!r}"
    return None


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def write_call(call: ToolCall) -> str:
    """A call without an error as Python, which is what the package executes.

    The values are JSON's, of which Python's own representation cannot be left.
    """
    arguments = ",".join(f"{name}={value!r}" for name, value in call.arguments.items())
    return f"{call.name}({arguments})"


def _read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [Message(role=message["role"], content=message["content"]) for message in messages]
