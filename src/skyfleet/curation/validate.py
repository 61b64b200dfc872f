"""Validate: every check on every task, many tasks at once, a verdict for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from skyfleet.curation.journal import Journal
from skyfleet.curation.leaks import answer_in_prompt, repeated
from skyfleet.curation.replay import replay
from skyfleet.curation.teacher import Teacher, teach
from skyfleet.curation.verdict import Fault, Reason, Verdict
from skyfleet.envs.env import EnvFactory
from skyfleet.tasks.task import Task


async def validate(
    sources: Mapping[str, Sequence[Task]],
    open_env: EnvFactory,
    *,
    journal: Journal,
    teacher: Teacher | None = None,
    workers: int = 16,
    timeout_seconds: float = 60,
    on_finished: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """One verdict a task, source after source. What the journal knows is not checked again."""
    gate = asyncio.Semaphore(workers)
    faults = repeated(sources)

    async def judged(source: str, task: Task) -> Verdict:
        verdict = None
        if (source, task.key) in faults:
            verdict = Verdict.on(task, faults[source, task.key])
        verdict = verdict or journal.find(task)
        if verdict is None:
            async with gate:
                fault = await check(task, open_env, teacher, timeout_seconds=timeout_seconds)
            verdict = Verdict.on(task, fault)
            journal.add(verdict)
        on_finished(verdict)
        return verdict

    async with asyncio.TaskGroup() as checks:
        running = [
            checks.create_task(judged(source, task))
            for source, tasks in sources.items()
            for task in tasks
        ]
    return [one.result() for one in running]


async def check(
    task: Task, open_env: EnvFactory, teacher: Teacher | None, *, timeout_seconds: float
) -> Fault | None:
    """The first thing that is wrong, the cheapest checks first."""
    if not task.solution and teacher is None:
        return Reason.NO_REFERENCE, "solution is empty; give one, or ask a teacher"
    if fault := answer_in_prompt(task):
        return fault
    if fault := await replay(task, open_env, timeout_seconds=timeout_seconds):
        return fault
    if teacher is None:
        return None
    return await teach(task, open_env, teacher, timeout_seconds=timeout_seconds)
