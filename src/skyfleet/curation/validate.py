"""Data validation: run every check on every task concurrently and return one verdict per task."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence

from skyfleet.curation.inspecting import ANSWERING
from skyfleet.curation.journal import Journal
from skyfleet.curation.replay import replay
from skyfleet.curation.teacher import Teacher, teach
from skyfleet.curation.verdict import Fault, Reason, Verdict
from skyfleet.envs.env import EnvFactory
from skyfleet.tasks.duplicates import find_near_duplicates
from skyfleet.tasks.preparing import fingerprint, words
from skyfleet.tasks.task import Task

SHORTEST_NUMBER = 3
"""Digits: a prompt may well hold the 4 that is also the answer, without giving it away."""


def answer_in_prompt(task: Task) -> Fault | None:
    """Only answers in words are looked for; what is done is graded by what it changes."""
    for call in task.solution:
        answer = words(str(call.arguments.get("answer", ""))) if call.name == ANSWERING else ""
        if not answer or (answer.isdecimal() and len(answer) < SHORTEST_NUMBER):
            continue
        if _says(words(task.prompt), answer):
            return Reason.ANSWER_IN_PROMPT, f"the prompt says {answer!r}"
    return None


def _says(prompt: str, answer: str) -> bool:
    """Somewhere else than in a choice: `allowed or forbidden` gives neither away."""
    return bool(re.search(rf"(?<!\bor )\b{re.escape(answer)}\b(?! or\b)", prompt))


def repeated(sources: Mapping[str, Sequence[Task]]) -> dict[tuple[str, str], Fault]:
    """By source and key: the tasks that ask what an earlier one asks, nearly, or share its key.

    What repeats nothing but a repetition stays.
    """
    first: dict[str, tuple[str, str]] = {}
    faults: dict[tuple[str, str], Fault] = {}
    unique: list[tuple[str, Task]] = []
    for source, tasks in sources.items():
        for task in tasks:
            marks = (f"key {task.key}", fingerprint(task))
            if earlier := next((first[mark] for mark in marks if mark in first), None):
                there, key = earlier
                faults[source, task.key] = _same(source, there, f"the same as {key}")
                continue
            first |= dict.fromkeys(marks, (source, task.key))
            unique.append((source, task))
    for place, earlier_place in find_near_duplicates([task for _, task in unique]).items():
        (source, task), (there, twin) = unique[place], unique[earlier_place]
        faults[source, task.key] = _same(source, there, f"nearly the same as {twin.key}")
    return faults


def _same(source: str, there: str, told: str) -> Fault:
    if there == source:
        return Reason.DUPLICATE, told
    return Reason.OVERLAP, f"{told} of {there}"


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
    """One verdict a task, source after source. What the journal knows is not checked again.

    Only a task without fault makes another its repetition: of a bad task and its mended twin the
    twin is judged by itself.
    """
    gate = asyncio.Semaphore(workers)
    verdicts: dict[tuple[str, str], Verdict] = {}

    async def judge(source: str, task: Task) -> None:
        verdict = journal.find(task)
        if verdict is None:
            async with gate:
                fault = await check(task, open_env, teacher, timeout_seconds=timeout_seconds)
            verdict = Verdict.on(task, fault)
            journal.add(verdict)
        verdicts[source, task.key] = verdict
        on_finished(verdict)

    def not_bad(source: str, task: Task) -> bool:
        return (source, task.key) not in verdicts or verdicts[source, task.key].ok

    while True:
        good = {s: [t for t in tasks if not_bad(s, t)] for s, tasks in sources.items()}
        faults = repeated(good)
        known = verdicts.keys() | faults.keys()
        due = [(s, t) for s, tasks in good.items() for t in tasks if (s, t.key) not in known]
        if not due:
            break
        async with asyncio.TaskGroup() as checks:
            for source, task in due:
                checks.create_task(judge(source, task))
    for source, tasks in good.items():
        for task in tasks:
            if fault := faults.get((source, task.key)):
                verdicts[source, task.key] = Verdict.on(task, fault)
                on_finished(verdicts[source, task.key])
    return [verdicts[source, task.key] for source, tasks in sources.items() for task in tasks]


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
