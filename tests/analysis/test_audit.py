"""Planted unearned passes are found; an honest run has no finding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.trajectories.making import attempt

from skyfleet.analysis.audit import Audit, Finding, Suspicion, audit
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.archive import train_path, write_groups
from skyfleet.trajectories.index import list_entries
from skyfleet.trajectories.trajectory import Group, Trajectory
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks, get_world, open_world

LIMITS = Limits(max_turns=12, max_input_length=0, trajectory_timeout_seconds=0)
WON = Grade(reward=1.0, success=True)


async def played(tasks: Sequence[Task], policy: AgentFactory) -> list[Trajectory]:
    groups = await collect(tasks, open_world, policy, LIMITS, n_samples=1, max_concurrent=8)
    return [group.trajectories[0] for group in groups]


async def found(
    folder: Path, episodes: Sequence[Trajectory], tasks: Sequence[Task], *, replaying: bool = False
) -> list[Finding]:
    groups = [Group(task_key=e.task_key, env_key=e.env_key, trajectories=(e,)) for e in episodes]
    write_groups(train_path(folder, 1), groups)
    return list((await audited(folder, tasks, replaying=replaying)).findings)


async def audited(folder: Path, tasks: Sequence[Task], *, replaying: bool = False) -> Audit:
    by_key = {task.key: task for task in tasks}
    return await audit(list_entries(folder), by_key, open_world if replaying else None)


def writes(task: Task) -> bool:
    writing = get_world(task.env_key).toolkit.writing
    return any(call.name in writing for call in task.solution)


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return generate_world_tasks("github", split="all", count=20)


async def test_the_reference_solutions_of_all_environments_have_no_finding(tmp_path: Path) -> None:
    tasks = [t for name in WORLD_NAMES for t in generate_world_tasks(name, split="all", count=12)]
    episodes = await played(tasks, oracle_policy)
    assert all(episode.success for episode in episodes)
    assert await found(tmp_path, episodes, tasks, replaying=True) == []


async def test_a_pass_without_a_writing_call_is_found(tmp_path: Path, tasks: list[Task]) -> None:
    writing = [task for task in tasks if writes(task)][:2]
    idle, honest = (
        (await played(writing, null_policy))[0],
        (await played(writing, oracle_policy))[1],
    )
    findings = await found(tmp_path, [replace(idle, grade=WON), honest], writing)
    assert [(f.entry_id, f.suspicion) for f in findings] == [
        ("train/1/0", Suspicion.UNTOUCHED_STATE),
        ("train/1/0", Suspicion.NEEDED_TOOL_UNUSED),
    ]


async def test_a_failed_writing_call_counts_as_an_untouched_state(
    tmp_path: Path, tasks: list[Task]
) -> None:
    writing = [task for task in tasks if writes(task)][:1]
    (honest,) = await played(writing, oracle_policy)
    refused = tuple(
        replace(turn, replies=tuple(replace(reply, is_error=True) for reply in turn.replies))
        for turn in honest.turns
    )
    findings = await found(tmp_path, [replace(honest, turns=refused)], writing)
    assert [f.suspicion for f in findings] == [Suspicion.UNTOUCHED_STATE]


async def test_a_guessed_answer_lacks_a_tool_of_the_reference_solution(
    tmp_path: Path, tasks: list[Task]
) -> None:
    asked = [task for task in tasks if not writes(task)][:1]
    guessing = [task.model_copy(update={"solution": task.solution[-1:]}) for task in asked]
    (guess,) = await played(guessing, oracle_policy)
    assert guess.success
    (finding,) = await found(tmp_path, [guess], asked)
    assert finding.suspicion is Suspicion.NEEDED_TOOL_UNUSED
    assert asked[0].solution[0].name in finding.detail


async def test_a_pass_whose_replay_fails_is_found(tmp_path: Path, tasks: list[Task]) -> None:
    writing = [task for task in tasks if writes(task)][:2]
    episodes = await played(writing, oracle_policy)
    # Without its last call, although it is recorded as passed.
    short = replace(episodes[0], turns=episodes[0].turns[:-2] + episodes[0].turns[-1:])
    findings = await found(tmp_path, [short, episodes[1]], writing, replaying=True)
    assert ("train/1/0", Suspicion.REPLAY_FAILS) in [(f.entry_id, f.suspicion) for f in findings]
    assert not [f for f in findings if f.entry_id == "train/1/1"]


def failing(explanation: str, n: int) -> list[Trajectory]:
    return [
        replace(
            attempt(0.0, task_key=f"t{number % 7}"),
            grade=Grade(reward=0.0, success=False, explanation=explanation.format(n=number)),
        )
        for number in range(n)
    ]


async def test_a_dominant_message_is_found_despite_varying_numbers(
    tmp_path: Path,
) -> None:
    printed = (
        ">>> ERROR_ACCUMULATOR >>>\n[\"[X] The answer is '{n}', expected 3\"]\n"
        "<<< ERROR_ACCUMULATOR <<<\n"
    )
    findings = await found(tmp_path, failing(printed, 21) + failing("other words", 9), [])
    assert [(f.suspicion, f.detail) for f in findings] == [
        (
            Suspicion.DOMINANT_MESSAGE,
            "70 % of 30 failures have the message: [X] The answer is …, expected …",
        )
    ]


async def test_few_failures_or_different_messages_have_no_dominant_message(tmp_path: Path) -> None:
    assert await found(tmp_path / "few", failing("same", 19), []) == []
    divided = failing("one", 15) + failing("another", 15)
    assert await found(tmp_path / "divided", divided, []) == []


async def test_a_pass_of_an_unknown_task_is_skipped(tmp_path: Path) -> None:
    assert await found(tmp_path, [attempt(1.0)], []) == []


async def test_an_audit_counts_the_passes_that_each_check_covers(
    tmp_path: Path, tasks: list[Task]
) -> None:
    episodes = await played(tasks, oracle_policy)
    unsolved = [task.model_copy(update={"solution": ()}) for task in tasks[:4]]
    await found(tmp_path, [*episodes, attempt(0.0)], tasks)
    judged = (await audited(tmp_path, [*unsolved, *tasks[4:]], replaying=True)).judged
    assert judged == {
        Suspicion.UNTOUCHED_STATE: sum(map(writes, tasks[4:])),
        Suspicion.NEEDED_TOOL_UNUSED: 16,
        Suspicion.REPLAY_FAILS: 20,
        Suspicion.DOMINANT_MESSAGE: 1,
    }
