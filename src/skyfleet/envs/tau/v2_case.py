"""One episode of tau2: its own Environment executes the tools of both sides; states are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from skyfleet.chat.message import ToolSpec
from skyfleet.envs.tau.conversation import ToolResult
from skyfleet.envs.tau.states import Changes
from skyfleet.envs.tau.v2_package import Domain
from skyfleet.tasks.task import Grade

_expected: dict[tuple[str, str], Changes] = {}
"""What the reference of a task changes, by domain and id."""


class Tau2Case:
    def __init__(self, domain: Domain, task: Any) -> None:
        """`task` is the package's."""
        self._domain, self._task = domain, task
        self._environment = domain.open()
        set_initial_state(self._environment, task)
        self._trajectory: list[Any] = list(read_history(task))
        self._call_ids = count()
        self.system = domain.system
        self.writing = domain.writing

    @property
    def environment(self) -> Any:
        """tau2's."""
        return self._environment

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._domain.tools

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return self._call(name, arguments, "assistant")

    def call_as_user(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return self._call(name, arguments, "user")

    def record_agent(self, text: str) -> None:
        message = self._domain.package.message.AssistantMessage(role="assistant", content=text)
        self._trajectory.append(message)

    def record_user(self, text: str) -> None:
        message = self._domain.package.message.UserMessage(role="user", content=text)
        self._trajectory.append(message)

    def grade(self) -> Grade:
        """The product of the components that the task's reward is based on, except the judge's."""
        criteria = self._task.evaluation_criteria
        if criteria is None:
            return Grade(reward=1.0, success=True)
        check = {
            "DB": self._check_databases,
            "ENV_ASSERTION": self._check_assertions,
            "ACTION": self._check_actions,
            "COMMUNICATE": self._check_communication,
        }
        parts = {
            basis.value: check[basis.value]()
            for basis in criteria.reward_basis
            if basis.value in check
        }
        passed = all(parts.values())
        failed = ", ".join(name for name, value in parts.items() if not value)
        notes = [f"not fulfilled: {failed}"] if failed else []
        if needs_judge(self._task):
            notes.append("natural-language assertions were not judged: database only")
        return Grade(
            reward=float(passed),
            success=passed,
            parts={name: float(value) for name, value in parts.items()},
            explanation="; ".join(notes),
        )

    def state(self) -> str:
        # Messages count in some tasks, so equal databases alone are not equal states.
        messages = [
            message.content
            for message in self._trajectory
            if message.role == "assistant" and message.content
        ]
        return f"{sorted(self._find_changes().items())} {messages}"

    def _call(self, name: str, arguments: Mapping[str, Any], requestor: str) -> ToolResult:
        classes = self._domain.package.message
        call = classes.ToolCall(
            id=f"call_{next(self._call_ids)}",
            name=name,
            arguments=dict(arguments),
            requestor=requestor,
        )
        response = self._environment.get_response(call)
        kind = classes.UserMessage if requestor == "user" else classes.AssistantMessage
        self._trajectory += [kind(role=requestor, content=None, tool_calls=[call]), response]
        return ToolResult(text=response.content, is_error=response.error)

    def _check_databases(self) -> bool:
        criteria = self._task.evaluation_criteria
        if criteria.actions is None and criteria.env_assertions is None:
            return True
        return self._find_changes() == find_expected_changes(self._domain, self._task)

    def _check_assertions(self) -> bool:
        assertions = self._task.evaluation_criteria.env_assertions or []
        # All of them, as in the package: an assertion may synchronize the two databases.
        held = [self._holds(assertion) for assertion in assertions]
        return all(held)

    def _holds(self, assertion: Any) -> bool:
        try:
            holds = self._environment.run_env_assertion(assertion, raise_assertion_error=False)
        except ValueError:
            return False  # It is about a record that was never created.
        return bool(holds)

    def _check_actions(self) -> bool:
        return self._evaluate(self._domain.package.action_evaluator)

    def _check_communication(self) -> bool:
        return self._evaluate(self._domain.package.communicate_evaluator)

    def _evaluate(self, evaluator: Any) -> bool:
        found = evaluator.calculate_reward(task=self._task, full_trajectory=self._trajectory)
        return bool(found.reward == 1.0)

    def _find_changes(self) -> Changes:
        return self._domain.initial.find_changes(_list_databases(self._environment))


def needs_judge(task: Any) -> bool:
    """Whether tau2's official reward of the task needs a language model."""
    criteria = task.evaluation_criteria
    bases = () if criteria is None else [basis.value for basis in criteria.reward_basis]
    return "NL_ASSERTION" in bases and bool(criteria.nl_assertions)


def read_history(task: Any) -> Sequence[Any]:
    """The messages that the task starts with."""
    state = task.initial_state
    return () if state is None or state.message_history is None else state.message_history


def set_initial_state(environment: Any, task: Any) -> None:
    state = task.initial_state
    environment.set_state(
        initialization_data=None if state is None else state.initialization_data,
        initialization_actions=None if state is None else state.initialization_actions,
        message_history=list(read_history(task)),
    )


def find_expected_changes(domain: Domain, task: Any) -> Changes:
    """Replay the reference as tau2's evaluator does, once: a call that fails changes nothing."""
    place = domain.name, task.id
    if place not in _expected:
        environment = domain.open()
        set_initial_state(environment, task)
        for action in task.evaluation_criteria.actions or []:
            try:
                environment.make_tool_call(
                    tool_name=action.name, requestor=action.requestor, **action.arguments
                )
            except Exception:
                continue
        _expected[place] = domain.initial.find_changes(_list_databases(environment))
    return _expected[place]


def _list_databases(environment: Any) -> Mapping[str, Any]:
    databases = {"agent": environment.tools.db}
    if environment.user_tools is not None:
        databases["user"] = environment.user_tools.db
    return databases
