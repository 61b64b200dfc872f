"""Leaks: an answer that stands in the prompt, and tasks that are on both sides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from skyfleet.curation.inspecting import ANSWERING
from skyfleet.curation.verdict import Fault, Reason
from skyfleet.tasks.near import near_twins
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
    for place, earlier_place in near_twins([task for _, task in unique]).items():
        (source, task), (there, twin) = unique[place], unique[earlier_place]
        faults[source, task.key] = _same(source, there, f"nearly the same as {twin.key}")
    return faults


def _same(source: str, there: str, told: str) -> Fault:
    if there == source:
        return Reason.DUPLICATE, told
    return Reason.OVERLAP, f"{told} of {there}"
