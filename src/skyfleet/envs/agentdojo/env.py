"""AgentDojoEnv: one user task of AgentDojo, with its own tools, data, prompt and check.

One tool is added, `submit_final_answer`: a reference solution says its last words in it. A turn
without a call is the last one, as in AgentDojo.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.agentdojo.suites import VERSION, Scene, load_dojo, set_scene
from skyfleet.envs.env import DONE, Observation, Step
from skyfleet.envs.turns import SUBMIT, SUBMIT_NAME, take_turn
from skyfleet.errors import EnvError, VerifierError, wrap_errors
from skyfleet.tasks.task import Grade, Task


async def open_agentdojo(task: Task) -> AgentDojoEnv:
    """The env of a task that `agentdojo_tasks` gave."""
    if not {"suite", "user_task"} <= task.metadata.keys():
        raise EnvError(
            f"task {task.key}: metadata={task.metadata} names no suite and user_task of AgentDojo; "
            "take the rows that agentdojo_tasks gives"
        )
    return AgentDojoEnv(task)


class AgentDojoEnv:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._scene: Scene | None = None
        self._done = False
        self._calls: list[Any] = []
        self._said = ""

    async def reset(self) -> Observation:
        names = self._task.metadata
        version = self._task.env_version or VERSION
        self._scene = set_scene(names["suite"], version, names["user_task"])
        self._done, self._calls, self._said = False, [], ""
        system = Message(role="system", content=load_dojo().system)
        wish = Message(role="user", content=self._task.prompt)
        return Observation(messages=(system, wish), tools=(*self._scene.tools, SUBMIT))

    async def step(self, action: Message) -> Step:
        scene = self._opened
        if self._done:
            raise EnvError(f"task {self._task.key}: step after done; open another env")
        self._said = action.text.replace(DONE, "").strip()
        if not action.tool_calls and not action.malformed_calls:
            self._done = True
            return Step(done=True)

        async def answer(call: ToolCall) -> Step:
            return Step(messages=(self._answer_to(scene, call),), done=self._done)

        # Words beside a call end nothing in AgentDojo, not even <done>.
        return await take_turn(replace(action, content=""), answer)

    async def grade(self) -> Grade:
        # Comparing two worlds in depth takes up to a tenth of a second.
        passed = await asyncio.to_thread(self._judge, self._opened)
        return Grade(reward=float(passed), success=passed)

    async def close(self) -> None:
        self._scene = None

    @property
    def _opened(self) -> Scene:
        if self._scene is None:
            raise EnvError(f"task {self._task.key}: the env is not open; call reset first")
        return self._scene

    def _answer_to(self, scene: Scene, call: ToolCall) -> Message:
        if call.name != SUBMIT_NAME:
            text, error = self._run(scene, call)
        elif isinstance(answer := call.arguments.get("answer"), str):
            self._said, self._done = answer, True
            text, error = answer, None
        else:
            text, error = "", f"{SUBMIT_NAME} needs answer, a string"
        said = text if error is None else f"Error: {error}"
        return Message(role="tool", content=said, tool_call_id=call.id, is_error=error is not None)

    def _run(self, scene: Scene, call: ToolCall) -> tuple[str, str | None]:
        """What the tool gave and what was wrong, as AgentDojo's own executor has it."""
        dojo = load_dojo()
        # It catches what its tools raise, but not what odd arguments do before and after.
        try:
            made = dojo.function_call(function=call.name, args=dict(call.arguments), id=call.id)
            self._calls.append(made)
            asked = {"role": "assistant", "content": None, "tool_calls": [made]}
            *_, messages, _ = dojo.executor.query("", scene.runtime, scene.now, [asked])
        except Exception as error:
            return "", f"{type(error).__name__}: {error}"
        answer = messages[-1]
        return "\n".join(block["content"] for block in answer["content"]), answer["error"]

    def _judge(self, scene: Scene) -> bool:
        # The check is a stranger's code: it gets copies, and what it raises is its own fault.
        before, now = scene.before.model_copy(deep=True), scene.now.model_copy(deep=True)
        task = scene.user_task
        with wrap_errors(VerifierError, f"task {self._task.key}: utility"):
            passed = task.utility_from_traces(self._said, before, now, self._calls)
            if passed is None:
                passed = task.utility(self._said, before, now)
        return bool(passed)
