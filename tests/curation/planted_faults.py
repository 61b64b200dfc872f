"""Good tasks of the worlds, and faulty ones made from them, each with its expected reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice

from skyfleet.curation.inspection import InspectableWorldEnv
from skyfleet.curation.verdict import Reason
from skyfleet.tasks.task import Grade, RecordedCall, Task
from skyfleet.worlds.catalog import generate_world_tasks, get_world

ALWAYS = "def validate_task(env, final_answer=None):\n    return 1\n"
NEVER = "def validate_task(env, final_answer=None):\n    return 0\n"
CRASHES = (
    "def validate_task(env, final_answer=None):\n    return env.db('current').table('no').all()\n"
)
UNREADABLE = "def validate_task(env:\n"
ONLY_THE_REFERENCE = """\
def validate_task(env, final_answer=None):
    seed, current = env.db("seed"), env.db("current")
    seed.diff(current).expect_exactly({expected})
    return 1
"""
ANY_CHANGE = """\
def validate_task(env, final_answer=None):
    try:
        env.db("seed").diff(env.db("current")).expect_exactly([])
    except AssertionError:
        return 1
    return 0
"""


class FlakyWorldEnv(InspectableWorldEnv):
    async def grade(self) -> Grade:
        """Passes the first replay of a reference and fails the second."""
        grade = await super().grade()
        passed = grade.success and not FLAKES.get(self._task.key)
        FLAKES[self._task.key] = FLAKES.get(self._task.key, False) or grade.success
        return Grade(reward=float(passed), success=passed)


FLAKES: dict[str, bool] = {}


class WritingGraderEnv(InspectableWorldEnv):
    async def grade(self) -> Grade:
        grade = await super().grade()
        self._open_app.db.write("create table graded (at text)")
        return grade


async def open_planted(task: Task) -> InspectableWorldEnv:
    kinds = {Reason.FLAKY: FlakyWorldEnv, Reason.CHANGED_BY_GRADING: WritingGraderEnv}
    kind = kinds.get(task.metadata.get("planted", ""), InspectableWorldEnv)
    return kind(get_world(task.env_key), task)


def good_tasks(**n_by_world: int) -> list[Task]:
    return [
        task
        for name, count in n_by_world.items()
        for task in generate_world_tasks(name, split="all", count=count)
    ]


def bad_tasks() -> tuple[dict[str, list[Task]], dict[str, Reason]]:
    """Two sources with 62 faulty tasks, and the expected reason of each by its key."""
    good = good_tasks(github=160, outlook=80)
    doing = [task for task in good if task.solution[-1].name != "submit_final_answer"]
    asking = [task for task in good if task.solution[-1].name == "submit_final_answer"]
    in_words = [task for task in asking if not _answer(task).isdecimal()]
    fresh, fresh_words = iter(doing), iter(in_words)
    planted: list[tuple[Reason, Task]] = []

    def plant(
        reason: Reason, count: int, spoil: Callable[[Task], Task], tasks: Iterator[Task]
    ) -> None:
        for task in islice(tasks, count):
            marked = {**task.metadata, "planted": reason}
            planted.append((reason, spoil(task).model_copy(update={"metadata": marked})))

    plant(Reason.VACUOUS, 8, _with_verifier(ALWAYS), fresh)
    plant(Reason.IMPOSSIBLE, 8, _with_verifier(NEVER), fresh)
    plant(Reason.UNGRADED, 2, _with_verifier(CRASHES), fresh)
    plant(Reason.UNGRADED, 2, _with_verifier(UNREADABLE), fresh)
    plant(Reason.UNGRADED, 2, _graded_only_when_solved, fresh)
    plant(Reason.MUTANT_PASSES, 6, _with_verifier(ANY_CHANGE), fresh)
    plant(Reason.FLAKY, 5, lambda task: task, fresh)
    plant(Reason.CHANGED_BY_GRADING, 5, lambda task: task, fresh)
    plant(Reason.WRONG_CALL, 7, _with_wrong_call, fresh)
    plant(Reason.ANSWER_IN_PROMPT, 6, _with_answer_in_prompt, fresh_words)
    plant(Reason.ENV_FAILS, 1, lambda t: t.model_copy(update={"data_key": "kinesis"}), fresh)
    plant(Reason.UNVERIFIED, 1, lambda t: t.model_copy(update={"solution": ()}), fresh)
    originals = list(islice(fresh, 9))
    plant(Reason.DUPLICATE, 6, _reworded, iter(originals[:6]))
    sources = {"train": [*originals, *(task for _, task in planted)]}
    n_before = len(planted)
    plant(Reason.OVERLAP, 3, _reworded, iter(originals[6:]))
    sources["validation"] = [task for _, task in planted[n_before:]]
    return sources, {task.key: reason for reason, task in planted}


def _with_verifier(code: str) -> Callable[[Task], Task]:
    return lambda task: task.model_copy(update={"verifier_code": code})


def _graded_only_when_solved(task: Task) -> Task:
    found = re.search(r"expected_changes = (\[.*?\n    \])", task.verifier_code or "", re.DOTALL)
    assert found
    return _with_verifier(ONLY_THE_REFERENCE.format(expected=found[1]))(task)


def _with_wrong_call(task: Task) -> Task:
    first, *others = task.solution
    wrong = RecordedCall(name=first.name, arguments={**first.arguments, "nmber": 1})
    return task.model_copy(update={"solution": (wrong, *others)})


def _answer(task: Task) -> str:
    return str(task.solution[-1].arguments["answer"])


def _with_answer_in_prompt(task: Task) -> Task:
    return task.model_copy(update={"prompt": f"{task.prompt} (It is {_answer(task)}.)"})


def _reworded(task: Task) -> Task:
    return task.model_copy(update={"key": f"{task.key}-again", "prompt": f"{task.prompt.upper()}!"})
