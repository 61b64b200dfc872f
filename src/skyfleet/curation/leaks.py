"""Leaks: an answer that stands in the prompt, and tasks that are on both sides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from skyfleet.curation.inspecting import ANSWERING
from skyfleet.curation.verdict import Fault, Reason
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
    """By source and key: the tasks that ask what an earlier one asks, or share its key."""
    first: dict[str, tuple[str, str]] = {}
    faults: dict[tuple[str, str], Fault] = {}
    for source, tasks in sources.items():
        for task in tasks:
            for mark in (f"key {task.key}", fingerprint(task)):
                there, key = first.setdefault(mark, (source, task.key))
                if (there, key) == (source, task.key):
                    continue
                if there == source:
                    faults[source, task.key] = Reason.DUPLICATE, f"the same as {key}"
                else:
                    faults[source, task.key] = Reason.OVERLAP, f"the same as {key} of {there}"
    return faults
