"""List AgentDojo's user tasks as tasks, each with the suite's own solution."""

from __future__ import annotations

from skyfleet.envs.agentdojo.suites import VERSION, find_suite, find_suites, load_suite_state
from skyfleet.envs.tool_turns import SUBMIT_NAME
from skyfleet.tasks.task import RecordedCall, Task


def agentdojo_tasks(suite: str | None = None, *, version: str = VERSION) -> list[Task]:
    """Return every user task of one suite, or of all four; none with an injection."""
    return [
        _make_task(name, version, user_task_id)
        for name in ([suite] if suite else find_suites(version))
        for user_task_id in find_suite(name, version).user_tasks
    ]


def _make_task(suite_name: str, version: str, user_task_id: str) -> Task:
    state = load_suite_state(suite_name, version, user_task_id)
    calls = [
        RecordedCall(name=call.function, arguments=dict(call.args))
        for call in state.user_task.ground_truth(state.now)
    ]
    if answer := state.user_task.GROUND_TRUTH_OUTPUT:
        calls.append(RecordedCall(name=SUBMIT_NAME, arguments={"answer": answer}))
    return Task(
        key=f"agentdojo-{suite_name}-{user_task_id}",
        env_key=f"agentdojo-{suite_name}",
        env_version=version,
        prompt=state.user_task.PROMPT,
        difficulty=state.user_task.DIFFICULTY.value,
        solution=tuple(calls),
        metadata={"suite": suite_name, "user_task": user_task_id},
    )
