"""tau2's tasks as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.tau.v2_case import needs_judge, read_history
from skyfleet.envs.tau.v2_facts import PASSED_BY_NOTHING, REFERENCE_ERRORS, WITHOUT_REFERENCE
from skyfleet.envs.tau.v2_package import DOMAINS, Domain, check_domain, load_domain
from skyfleet.envs.tau.v2_users import write_request
from skyfleet.envs.tool_turns import RESPOND_NAME
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import EXPECTED_ERRORS, NULL_SUCCESS, RecordedCall, Task

ENV_CLASS = "tau2"
GRADED = "graded"
DATABASE_ONLY = "database only"
"""Value of `metadata.graded`: tau2's own reward also needs a language model as judge."""


def tau2_tasks(domain_name: str, split: str = "base") -> list[Task]:
    """Return the tasks of a split, with tau2's actions and required information as the solution."""
    check_domain(domain_name)
    if split not in DOMAINS[domain_name]:
        raise ConfigError(
            f"tau2's {domain_name} has no split {split!r}; choose from "
            f"{', '.join(DOMAINS[domain_name])}"
        )
    domain = load_domain(domain_name)
    wanted = set(domain.splits[split])
    return [_make_task(domain, task) for key, task in domain.tasks.items() if key in wanted]


def _make_task(domain: Domain, task: Any) -> Task:
    metadata: dict[str, Any] = {
        "data_source": ENV_CLASS,
        "extra_info": {"domain": domain.name, "task_id": task.id},
    }
    if needs_judge(task):
        metadata[GRADED] = DATABASE_ONLY
    if domain.is_tested and task.id in domain.splits["base"]:
        metadata[NULL_SUCCESS] = task.id in PASSED_BY_NOTHING[domain.name]
        if n_errors := REFERENCE_ERRORS.get(domain.name, {}).get(task.id):
            metadata[EXPECTED_ERRORS] = n_errors
    return Task(
        key=f"{ENV_CLASS}-{domain.name}-{task.id}",
        env_key=f"{ENV_CLASS}-{domain.name}",
        env_class=ENV_CLASS,
        prompt=str(task.user_scenario),
        solution=() if task.id in WITHOUT_REFERENCE else tuple(_list_reference_calls(task)),
        metadata=metadata,
    )


def _list_reference_calls(task: Any) -> list[RecordedCall]:
    """The agent's calls, its requests to the user to use a tool, and last the required information."""
    criteria = task.evaluation_criteria
    calls = []
    for action in () if criteria is None else criteria.actions or ():
        if action.requestor == "assistant":
            calls.append(RecordedCall(name=action.name, arguments=action.arguments))
        else:
            calls.append(_say(f"Please run {write_request(action.name, action.arguments)}."))
    if criteria is not None and criteria.communicate_info:
        calls.append(_say("; ".join(criteria.communicate_info)))
    return calls


def _say(text: str) -> RecordedCall:
    return RecordedCall(name=RESPOND_NAME, arguments={"content": text})


def write_opening(task: Any) -> str:
    """What a scripted user says at first: everything it was instructed."""
    instructions = task.user_scenario.instructions
    if isinstance(instructions, str):
        return instructions
    parts = (
        instructions.reason_for_call,
        instructions.known_info,
        instructions.task_instructions,
    )
    return "\n".join(part for part in parts if part)


def convert_history(task: Any) -> list[Message]:
    """The messages that the task starts with, as the agent sees them."""
    messages = []
    for message in read_history(task):
        if message.role == "tool" and message.requestor == "user":
            continue
        calls: Sequence[Any] = getattr(message, "tool_calls", None) or ()
        if message.role == "user" and calls:
            continue
        messages.append(
            Message(
                role=message.role,
                content=message.content or "",
                tool_calls=tuple(
                    ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls
                ),
                tool_call_id=message.id if message.role == "tool" else None,
            )
        )
    return messages
