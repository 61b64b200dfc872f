"""Groups of an asynchronous run: none late, none lost, none twice, and no length preferred."""

from __future__ import annotations

from random import Random

import pytest

from skyfleet.errors import CheckpointError
from skyfleet.tasks.sampling import TaskSampler
from skyfleet.tasks.task import Task
from skyfleet.trainer.open_groups import OpenGroup, OpenGroups

TASKS = [Task(key=f"task {n}", env_key="github", prompt="do it") for n in range(12)]
LONG = {task.key for task in TASKS[:3]}
"""A quarter of the tasks take many times as long as the others."""


def make_groups(
    *, batch_size: int = 4, max_staleness_steps: int = 2, total_steps: int = 60
) -> OpenGroups:
    return OpenGroups(
        TASKS,
        batch_size=batch_size,
        max_staleness_steps=max_staleness_steps,
        total_steps=total_steps,
    )


class Simulation:
    """Plays groups by a clock of its own: `tick` ends what is due and starts what may run."""

    def __init__(self, groups: OpenGroups, *, n_workers: int, seed: int) -> None:
        self.groups, self.n_workers, self.rng = groups, n_workers, Random(seed)
        self.sampler = TaskSampler(TASKS, batch_size=groups.batch_size, seed=seed)
        self.ends: dict[int, int] = {}
        self.started: list[OpenGroup] = []
        self.trained: list[tuple[int, OpenGroup]] = []
        self.now = 0

    def tick(self, step: int) -> None:
        self.now += 1
        for number in [n for n, end in self.ends.items() if end <= self.now]:
            group = self.groups[number]
            group.is_running = False
            group.finish(0)
            self.groups.add_finished(group)
            del self.ends[number]
        self.groups.draw(self.sampler, step)
        for group in self.groups.list_startable(step)[: self.n_workers - len(self.ends)]:
            is_long = group.task.key in LONG
            seconds = self.rng.randint(40, 60) if is_long else self.rng.randint(1, 4)
            group.is_running, group.started_step = True, step
            self.ends[group.number] = self.now + seconds
            self.started.append(group)

    def run(self, total_steps: int) -> None:
        for step in range(1, total_steps + 1):
            self.groups.forget_trained(step - 1)
            while (chosen := self.groups.select(step)) is None:
                self.tick(step)
            self.groups.assign(step, chosen)
            self.trained += ((step, group) for group in chosen)
            for _ in range(self.rng.randint(0, 8)):  # the update, beside which episodes go on
                self.tick(step)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("staleness", "n_workers"), [(0, 4), (1, 4), (2, 5), (2, 12), (5, 6)])
def test_every_started_group_is_trained_on_once_and_in_time(
    staleness: int, n_workers: int, seed: int
) -> None:
    groups = make_groups(max_staleness_steps=staleness)
    run = Simulation(groups, n_workers=n_workers, seed=seed)
    run.run(60)
    numbers = [group.number for _, group in run.trained]
    assert sorted(numbers) == list(range(240)), "each once, and nothing else was started"
    assert [group.number for group in run.started] == list(range(240)), "in the sampler's order"
    late = [step - (group.started_step or 0) for step, group in run.trained]
    assert max(late) <= staleness
    assert min(late) >= 0
    if staleness and n_workers < 4 * (staleness + 1):
        assert numbers != sorted(numbers), "groups are trained on as they finish"


@pytest.mark.parametrize("seed", range(4))
def test_the_share_of_long_episodes_that_are_trained_on_is_that_of_those_started(seed: int) -> None:
    run = Simulation(make_groups(max_staleness_steps=2), n_workers=6, seed=seed)
    run.run(60)
    started = [group.task.key in LONG for group in run.started]
    assert sum(started) == 60, "a quarter"
    trained = [group.task.key in LONG for _, group in run.trained]
    # At every moment, not only at the end: at most what is in flight is missing.
    for step in range(5, 61):
        n = step * 4
        assert abs(sum(trained[:n]) - sum(started[:n])) <= 6, "groups in flight"
    assert sum(trained) == sum(started)


def test_a_group_that_would_be_late_is_waited_for() -> None:
    groups = make_groups(batch_size=2, max_staleness_steps=1)
    sampler = TaskSampler(TASKS, batch_size=2, seed=0)
    groups.draw(sampler, 1)
    slow, *others = list(groups)
    assert len(others) == 3
    for group in groups:
        group.started_step = 1

    def finish(group: OpenGroup) -> None:
        group.finish(0)
        groups.add_finished(group)

    for group in others:
        finish(group)
    chosen = groups.select(1)
    assert chosen == others[:2], "as they finished"
    groups.assign(1, chosen)
    groups.forget_trained(1)
    groups.draw(sampler, 2)
    for group in groups:
        if group.started_step is None:
            group.started_step = 2
            finish(group)
    assert groups.select(2) is None, "three are finished, but the slow one was started in step 1"
    finish(slow)
    assert groups.select(2) == [slow, others[2]]


def test_a_replaced_group_lets_another_one_start_and_is_reported_once() -> None:
    groups = make_groups(batch_size=2, max_staleness_steps=0)
    sampler = TaskSampler(TASKS, batch_size=2, seed=0)
    groups.draw(sampler, 1)
    first, second = groups
    for group in (first, second):
        group.started_step = 1
        group.finish(0)
        groups.add_finished(group)
    groups.drop(first)
    assert groups.select(1) is None
    groups.draw(sampler, 1)
    (third,) = groups.list_startable(1)
    assert third.number == 2
    third.started_step = 1
    third.finish(0)
    groups.add_finished(third)
    chosen = groups.select(1)
    assert chosen == [second, third]
    assigned = groups.add_dropped(chosen)
    assert assigned == [first, second, third]
    groups.assign(1, assigned)
    assert groups.state_dict(1)["n_replaced"] == 1
    groups.forget_trained(1)
    groups.draw(sampler, 2)
    assert [group.number for group in groups.list_startable(2)] == [3, 4]


def test_open_groups_survive_a_checkpoint() -> None:
    groups = make_groups(batch_size=2, max_staleness_steps=1)
    sampler = TaskSampler(TASKS, batch_size=2, seed=0)
    groups.draw(sampler, 1)
    for group in groups:
        group.started_step = 1
        group.finish(0)
        groups.add_finished(group)
    chosen = groups.select(1)
    assert chosen is not None
    groups.assign(1, chosen)
    before, after = groups.state_dict(0), groups.state_dict(1)
    assert [number for number, _ in before["groups"]] == [0, 1, 2, 3], "step 1 is not complete"
    assert [number for number, _ in after["groups"]] == [2, 3]
    resumed = make_groups(batch_size=2, max_staleness_steps=1)
    resumed.load_state_dict(after)
    assert resumed.state_dict(1) == after
    assert [group.number for group in resumed.list_startable(2)] == [2, 3]
    with pytest.raises(CheckpointError, match="open group of task 'gone'"):
        resumed.load_state_dict({"groups": [[0, "gone"]]})
