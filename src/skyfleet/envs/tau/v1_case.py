"""One episode of tau-bench: its own Env executes the tools, and states are compared for the grade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyfleet.chat.message import ToolSpec
from skyfleet.envs.tau.conversation import ToolResult
from skyfleet.envs.tau.states import Changes
from skyfleet.envs.tau.v1_package import Domain
from skyfleet.envs.tool_turns import RESPOND_NAME
from skyfleet.tasks.task import Grade

_expected: dict[tuple[str, str], Changes] = {}
"""What a reference changes, by its domain and its actions."""

_READING = ("get_", "find_", "list_", "search_", "calculate", "think", "transfer_")


class TauBenchCase:
    def __init__(self, domain: Domain, task: Any) -> None:
        """`task` is the package's."""
        self._domain, self._task = domain, task
        self._env = domain.open(task)
        self.system = domain.system
        self.writing = frozenset(
            tool.name for tool in domain.tools if not tool.name.startswith(_READING)
        )

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._domain.tools

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        text = str(self._env.step(self._make_action(name, dict(arguments))).observation)
        is_error = text.startswith(("Error", "Unknown action"))
        return ToolResult(text=text, is_error=is_error, ends=name in self._domain.ending_tools)

    def record_agent(self, text: str) -> None:
        self._env.actions.append(self._make_action(RESPOND_NAME, {"content": text}))

    def record_user(self, text: str) -> None: ...

    def grade(self) -> Grade:
        """As `Env.calculate_reward`: the reference's database, and every output in some message."""
        has_state = self._find_changes() == find_expected_changes(self._domain, self._task)
        messages = [
            action.kwargs["content"].lower().replace(",", "")
            for action in self._env.actions
            if action.name == RESPOND_NAME
        ]
        missing = [
            output
            for output in self._task.outputs
            if not any(output.lower() in message for message in messages)
        ]
        passed = has_state and not missing
        found = [] if has_state else ["the database is not the reference's"]
        found += [f"no message contains {output!r}" for output in missing]
        return Grade(
            reward=float(passed),
            success=passed,
            parts={"database": float(has_state), "outputs": float(not missing)},
            explanation="; ".join(found),
        )

    def state(self) -> str:
        messages = [action.kwargs for action in self._env.actions if action.name == RESPOND_NAME]
        return f"{sorted(self._find_changes().items())} {messages}"

    def _find_changes(self) -> Changes:
        return self._domain.initial.find_changes(self._env.data)

    def _make_action(self, name: str, arguments: dict[str, Any]) -> Any:
        return self._domain.action_class(name=name, kwargs=arguments)


def find_expected_changes(domain: Domain, task: Any) -> Changes:
    """Replay the reference as tau-bench does, once: without the tools that end an episode."""
    place = domain.name, repr(task.actions)
    if place not in _expected:
        env = domain.open(task)
        for action in task.actions:
            if action.name not in (*domain.ending_tools, RESPOND_NAME):
                env.step(action)
        _expected[place] = domain.initial.find_changes(env.data)
    return _expected[place]
