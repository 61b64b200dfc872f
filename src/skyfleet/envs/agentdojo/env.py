"""AgentDojoEnv: one user task of AgentDojo, with its own tools, data, prompt and check.

One tool is added, `submit_final_answer`, by which a reference solution gives its final text. As in
AgentDojo, a turn without a call is the last one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from skyfleet.chat.message import Message, ToolCall
from skyfleet.config.root import RunConfig
from skyfleet.envs.agentdojo.suites import VERSION, SuiteState, load_dojo, load_suite_state
from skyfleet.envs.env import DONE, EnvFactory, Observation, Step
from skyfleet.envs.tool_turns import SUBMIT, SUBMIT_NAME, run_tool_calls
from skyfleet.errors import EnvError, VerifierError, wrap_errors
from skyfleet.tasks.task import Grade, Task


def build_factory(config: RunConfig) -> EnvFactory:
    return open_agentdojo


async def open_agentdojo(task: Task) -> AgentDojoEnv:
    """Open the environment of a task from `agentdojo_tasks`."""
    if not {"suite", "user_task"} <= task.metadata.keys():
        raise EnvError(
            f"task {task.key}: metadata={task.metadata} names no suite and user_task of AgentDojo; "
            "use the rows that agentdojo_tasks returns"
        )
    return AgentDojoEnv(task)


class AgentDojoEnv:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._state: SuiteState | None = None
        self._done = False
        self._calls: list[Any] = []
        self._final_text = ""

    async def reset(self) -> Observation:
        names = self._task.metadata
        version = self._task.env_version or VERSION
        self._state = load_suite_state(names["suite"], version, names["user_task"])
        self._done, self._calls, self._final_text = False, [], ""
        system = Message(role="system", content=load_dojo().system)
        user = Message(role="user", content=self._task.prompt)
        return Observation(messages=(system, user), tools=(*self._state.tools, SUBMIT))

    async def step(self, action: Message) -> Step:
        state = self._open_state
        if self._done:
            raise EnvError(f"task {self._task.key}: step after done; open another env")
        self._final_text = action.text.replace(DONE, "").strip()
        if not action.tool_calls and not action.malformed_calls:
            self._done = True
            return Step(done=True)

        async def answer(call: ToolCall) -> Step:
            return Step(messages=(self._answer(state, call),), done=self._done)

        # In AgentDojo text beside a call does not end the episode, not even <done>.
        return await run_tool_calls(replace(action, content=""), answer)

    async def grade(self) -> Grade:
        # A deep comparison of two states takes up to a tenth of a second.
        passed = await asyncio.to_thread(self._check, self._open_state)
        return Grade(reward=float(passed), success=passed)

    async def close(self) -> None:
        self._state = None

    @property
    def _open_state(self) -> SuiteState:
        if self._state is None:
            raise EnvError(f"task {self._task.key}: the env is not open; call reset first")
        return self._state

    def _answer(self, state: SuiteState, call: ToolCall) -> Message:
        if call.name != SUBMIT_NAME:
            text, error = self._run(state, call)
        elif isinstance(answer := call.arguments.get("answer"), str):
            self._final_text, self._done = answer, True
            text, error = answer, None
        else:
            text, error = "", f"{SUBMIT_NAME} needs answer, a string"
        content = text if error is None else f"Error: {error}"
        return Message(
            role="tool", content=content, tool_call_id=call.id, is_error=error is not None
        )

    def _run(self, state: SuiteState, call: ToolCall) -> tuple[str, str | None]:
        """Return the tool's output and error from AgentDojo's own executor."""
        dojo = load_dojo()
        # The executor catches what its tools raise, but not what invalid arguments cause outside.
        try:
            dojo_call = dojo.function_call(
                function=call.name, args=dict(call.arguments), id=call.id
            )
            self._calls.append(dojo_call)
            message = {"role": "assistant", "content": None, "tool_calls": [dojo_call]}
            *_, messages, _ = dojo.executor.query("", state.runtime, state.now, [message])
        except Exception as error:
            return "", f"{type(error).__name__}: {error}"
        answer = messages[-1]
        return "\n".join(block["content"] for block in answer["content"]), answer["error"]

    def _check(self, state: SuiteState) -> bool:
        # The check is third-party code: it gets copies, and its exceptions are verifier errors.
        before, now = state.before.model_copy(deep=True), state.now.model_copy(deep=True)
        task = state.user_task
        with wrap_errors(VerifierError, f"task {self._task.key}: utility"):
            passed = task.utility_from_traces(self._final_text, before, now, self._calls)
            if passed is None:
                passed = task.utility(self._final_text, before, now)
        return bool(passed)
