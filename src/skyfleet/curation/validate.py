"""Data validation: run every check on every task concurrently and return one verdict per task."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence

from skyfleet.curation.replay import replay
from skyfleet.curation.teacher import Teacher, check_with_teacher
from skyfleet.curation.verdict import Fault, Journal, Reason, Verdict
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.tool_turns import SUBMIT_NAME
from skyfleet.tasks.duplicates import find_near_duplicates
from skyfleet.tasks.prepare import fingerprint, normalize_words
from skyfleet.tasks.task import Task

MIN_DIGITS = 3
"""A shorter number in the prompt may equal the answer by chance."""


def find_answer_in_prompt(task: Task) -> Fault | None:
    """Report a prompt that contains the submitted answer."""
    for call in task.solution:
        answer = (
            normalize_words(str(call.arguments.get("answer", "")))
            if call.name == SUBMIT_NAME
            else ""
        )
        if not answer or (answer.isdecimal() and len(answer) < MIN_DIGITS):
            continue
        if _contains_answer(normalize_words(task.prompt), answer):
            return Reason.ANSWER_IN_PROMPT, f"the prompt contains {answer!r}"
    return None


def _contains_answer(prompt: str, answer: str) -> bool:
    """A choice such as `allowed or forbidden` does not count: it reveals neither."""
    return bool(re.search(rf"(?<!\bor )\b{re.escape(answer)}\b(?! or\b)", prompt))


def find_duplicates(sources: Mapping[str, Sequence[Task]]) -> dict[tuple[str, str], Fault]:
    """Find duplicates and near-duplicates of earlier tasks, by source and key.

    A task that repeats only a duplicate stays.
    """
    first: dict[str, tuple[str, str]] = {}
    faults: dict[tuple[str, str], Fault] = {}
    unique: list[tuple[str, Task]] = []
    for source, tasks in sources.items():
        for task in tasks:
            identities = (f"key {task.key}", fingerprint(task))
            if earlier := next((first[one] for one in identities if one in first), None):
                other_source, key = earlier
                fault = _describe_duplicate(source, other_source, f"the same as {key}")
                faults[source, task.key] = fault
                continue
            first |= dict.fromkeys(identities, (source, task.key))
            unique.append((source, task))
    for index, earlier_index in find_near_duplicates([task for _, task in unique]).items():
        (source, task), (other_source, other) = unique[index], unique[earlier_index]
        evidence = f"nearly the same as {other.key}"
        faults[source, task.key] = _describe_duplicate(source, other_source, evidence)
    return faults


def _describe_duplicate(source: str, other_source: str, evidence: str) -> Fault:
    if other_source == source:
        return Reason.DUPLICATE, evidence
    return Reason.OVERLAP, f"{evidence} of {other_source}"


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
    """Return one verdict per task, source after source; verdicts in the journal are reused.

    Only a task without fault makes another one its duplicate: a corrected copy of a faulty task is
    validated on its own.
    """
    semaphore = asyncio.Semaphore(workers)
    verdicts: dict[tuple[str, str], Verdict] = {}

    async def validate_one(source: str, task: Task) -> None:
        verdict = journal.find(task)
        if verdict is None:
            async with semaphore:
                fault = await check(task, open_env, teacher, timeout_seconds=timeout_seconds)
            verdict = Verdict.on(task, fault)
            journal.add(verdict)
        verdicts[source, task.key] = verdict
        on_finished(verdict)

    def may_pass(source: str, task: Task) -> bool:
        return (source, task.key) not in verdicts or verdicts[source, task.key].ok

    while True:
        candidates = {s: [t for t in tasks if may_pass(s, t)] for s, tasks in sources.items()}
        faults = find_duplicates(candidates)
        known = verdicts.keys() | faults.keys()
        pending = [
            (s, t) for s, tasks in candidates.items() for t in tasks if (s, t.key) not in known
        ]
        if not pending:
            break
        async with asyncio.TaskGroup() as checks:
            for source, task in pending:
                checks.create_task(validate_one(source, task))
    for source, tasks in candidates.items():
        for task in tasks:
            if fault := faults.get((source, task.key)):
                verdicts[source, task.key] = Verdict.on(task, fault)
                on_finished(verdicts[source, task.key])
    return [verdicts[source, task.key] for source, tasks in sources.items() for task in tasks]


async def check(
    task: Task, open_env: EnvFactory, teacher: Teacher | None, *, timeout_seconds: float
) -> Fault | None:
    """Return the first fault, running the cheapest checks first."""
    if fault := find_answer_in_prompt(task):
        return fault
    if fault := await replay(task, open_env, timeout_seconds=timeout_seconds):
        return fault
    if teacher is None:
        unsolved = "solution is empty, so only doing nothing was tried; add one, or pass a teacher"
        return None if task.solution else (Reason.UNVERIFIED, unsolved)
    return await check_with_teacher(task, open_env, teacher, timeout_seconds=timeout_seconds)
