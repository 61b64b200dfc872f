"""tau-bench's tasks as rows, and the package's task of a row."""

from __future__ import annotations

from typing import Any

from skyfleet.envs.tau.v1_facts import PASSED_BY_NOTHING, REFERENCE_ERRORS
from skyfleet.envs.tau.v1_package import Domain, check_domain, check_split, load_domain
from skyfleet.envs.tool_turns import RESPOND_NAME
from skyfleet.errors import TaskError
from skyfleet.tasks.task import EXPECTED_ERRORS, NULL_SUCCESS, RecordedCall, Task

ENV_CLASS = "tau_bench"


def tau_bench_tasks(domain_name: str, split: str = "test") -> list[Task]:
    """Return the tasks of a split, with tau-bench's actions and outputs as the reference solution."""
    check_domain(domain_name)
    check_split(domain_name, split)
    domain = load_domain(domain_name)
    return [
        _make_task(domain, split, index, task) for index, task in enumerate(domain.tasks[split])
    ]


def _make_task(domain: Domain, split: str, index: int, task: Any) -> Task:
    actions = [{"name": action.name, "kwargs": action.kwargs} for action in task.actions]
    metadata: dict[str, Any] = {
        "data_source": ENV_CLASS,
        "reward_spec": {"method": ENV_CLASS, "ground_truth": actions, "outputs": task.outputs},
        "extra_info": {
            "domain": domain.name,
            "split": split,
            "task_index": index,
            "instruction": task.instruction,
            "user_id": task.user_id,
        },
    }
    if domain.is_tested:
        place = domain.name, split
        metadata[NULL_SUCCESS] = index in PASSED_BY_NOTHING[place]
        if n_errors := REFERENCE_ERRORS.get(place, {}).get(index):
            metadata[EXPECTED_ERRORS] = n_errors
    return Task(
        key=f"{ENV_CLASS}-{domain.name}-{split}-{index}",
        env_key=domain.name,
        env_class=ENV_CLASS,
        prompt=task.instruction,
        solution=tuple(_list_reference_calls(domain, task)),
        metadata=metadata,
    )


def _list_reference_calls(domain: Domain, task: Any) -> list[RecordedCall]:
    """The actions, the outputs as one message, and last the tool that ends the conversation."""
    calls = [RecordedCall(name=action.name, arguments=action.kwargs) for action in task.actions]
    ending = [call for call in calls if call.name in domain.ending_tools]
    calls = [call for call in calls if call.name not in domain.ending_tools]
    if task.outputs:
        content = "; ".join(task.outputs)
        calls.append(RecordedCall(name=RESPOND_NAME, arguments={"content": content}))
    return [*calls, *ending[:1]]


def find_package_task(task: Task, domain: Domain) -> Any:
    """Return tau-bench's own task of a row, or make one from a row of other origin.

    Rows of the tau recipe have no outputs; where tau-bench has a task of the same instruction and
    actions, its outputs are used.
    """
    extra = task.metadata.get("extra_info") or {}
    spec = task.metadata.get("reward_spec") or {}
    instruction = extra.get("instruction") or task.prompt
    if {"split", "task_index"} <= extra.keys() and extra["split"] in domain.tasks:
        tasks = domain.tasks[extra["split"]]
        index = extra["task_index"]
        if not (0 <= index < len(tasks) and tasks[index].instruction == instruction):
            raise TaskError(
                f"task {task.key}: task {index} of {domain.name} {extra['split']} has another "
                "instruction in TAU_BENCH_PATH; list the tasks again, or use the version they are of"
            )
        return tasks[index]
    actions = spec.get("ground_truth") or spec.get("actions") or extra.get("actions") or []
    known = [*(tool.name for tool in domain.tools), RESPOND_NAME]
    for action in actions:
        if action["name"] not in known:
            raise TaskError(
                f"task {task.key}: its reference calls {action['name']!r}, which is no tool of "
                f"tau-bench's {domain.name}; correct the row or its domain"
            )
    made = domain.task_class(
        user_id=str(extra.get("user_id", "")),
        instruction=instruction,
        actions=[domain.action_class(**action) for action in actions],
        outputs=spec.get("outputs") or extra.get("outputs") or [],
    )
    same = (
        one
        for tasks in domain.tasks.values()
        for one in tasks
        if one.instruction == instruction and one.actions == made.actions
    )
    return made if made.outputs else next(same, made)
