"""OpenGroups: the groups of an asynchronous run that are drawn and not yet trained on.

Groups are numbered in the order in which the sampler drew them. A group is trained on at most
`max_staleness_steps` steps after it was started, and nothing that was started is thrown away: `select`
takes finished groups as they come, but holds places back for groups that would be late otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyfleet.errors import CheckpointError
from skyfleet.tasks.sampling import Sampler
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Group, Trajectory


@dataclass(slots=True, eq=False, kw_only=True)
class OpenGroup:
    number: int
    task: Task
    started_step: int | None = None
    """The step that was collected when its oldest token was sampled; None: not started."""
    episodes: dict[int, Trajectory] = field(default_factory=dict)
    """The finished attempts, by sample."""
    lines: dict[int, bytes] = field(default_factory=dict)
    """Their lines in the trajectory archive."""
    restored: set[int] = field(default_factory=set)
    """The samples that an earlier process played."""
    group: Group | None = None
    """All attempts, once they are finished."""
    trained_step: int | None = None
    """The step that trains on it, or that reports it as dropped."""
    is_running: bool = False
    is_dropped: bool = False
    """It was replaced by another group, because nothing is learnt from it."""

    @property
    def is_finished(self) -> bool:
        return self.group is not None and self.trained_step is None and not self.is_dropped

    def finish(self, n_samples: int) -> None:
        """All attempts are finished."""
        attempts = tuple(self.episodes[sample] for sample in range(n_samples))
        self.group = Group(task_key=self.task.key, env_key=self.task.env_key, trajectories=attempts)


class OpenGroups:
    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        batch_size: int,
        max_staleness_steps: int,
        total_steps: int,
    ) -> None:
        self.batch_size, self._total_steps = batch_size, total_steps
        self.max_staleness_steps = max_staleness_steps
        self._tasks = {task.key: task for task in tasks}
        self._groups: dict[int, OpenGroup] = {}
        self._finished: list[OpenGroup] = []
        """In the order in which they finished."""
        self._next_number = 0
        self._n_replaced = 0
        """Groups that steps before the open ones dropped."""

    def __iter__(self) -> Iterator[OpenGroup]:
        return iter(self._groups.values())

    def __getitem__(self, number: int) -> OpenGroup:
        return self._groups[number]

    def __contains__(self, number: int) -> bool:
        return number in self._groups

    def draw_of(self, group: OpenGroup) -> int:
        """The number of its draw from the sampler, from 1: its step in a synchronous run."""
        return 1 + group.number // self.batch_size

    def draw(self, sampler: Sampler, step: int) -> list[OpenGroup]:
        """Draw every batch of which a group may be started while `step` is collected.

        SkyRL's rule: at most (max_staleness_steps + step) x batch_size groups are started, so that at
        most (max_staleness_steps + 1) x batch_size wait. No group is started that no step would train.
        """
        new: list[OpenGroup] = []
        while self._next_number < self._count_allowed(step):
            for task in sampler.draw():
                new.append(OpenGroup(number=self._next_number, task=task))
                self._next_number += 1
        self._groups |= {group.number: group for group in new}
        return new

    def list_startable(self, step: int) -> list[OpenGroup]:
        """The groups to start while `step` is collected, in the order in which they were drawn."""
        allowed = self._count_allowed(step)
        return [
            group
            for group in self._groups.values()
            if group.number < allowed and not group.is_running and group.group is None
        ]

    def _count_allowed(self, step: int) -> int:
        steps = min(self.max_staleness_steps + step, self._total_steps)
        dropped = sum(group.is_dropped for group in self._groups.values())
        return steps * self.batch_size + self._n_replaced + dropped

    def add_finished(self, group: OpenGroup) -> None:
        self._finished.append(group)

    def drop(self, group: OpenGroup) -> None:
        """Nothing is learnt from it: another group takes its place."""
        group.is_dropped = True

    def forget_finished(self, group: OpenGroup) -> None:
        """It is played again."""
        group.group = None
        self._finished.remove(group)

    def select(self, step: int) -> list[OpenGroup] | None:
        """The finished groups that `step` trains on, by number; None if some must be waited for."""
        chosen: list[OpenGroup] = []
        needed = self._count_needed(step)
        for group in self._finished:
            if not group.is_finished or len(chosen) == self.batch_size:
                continue
            left, deadline = self.batch_size - len(chosen) - 1, self._get_deadline(group)
            # Whoever must be trained on by then, needs its place in this step.
            if all(n <= left for by, n in needed.items() if by < deadline):
                chosen.append(group)
                needed.update({by: n - 1 for by, n in needed.items() if by >= deadline})
        full = len(chosen) == self.batch_size
        return sorted(chosen, key=lambda group: group.number) if full else None

    def _count_needed(self, step: int) -> dict[int, int]:
        """By deadline: how many of the groups due by then this step must train on."""
        due = Counter(
            max(self._get_deadline(group), step)
            for group in self._groups.values()
            if group.started_step is not None and group.trained_step is None
            and not group.is_dropped
        )  # fmt: skip
        needed: dict[int, int] = {}
        total = 0
        for deadline in range(step, step + self.max_staleness_steps + 1):
            total += due[deadline]
            needed[deadline] = min(total - (deadline - step) * self.batch_size, self.batch_size)
        return needed

    def _get_deadline(self, group: OpenGroup) -> int:
        """The last step that may train on it."""
        assert group.started_step is not None
        return group.started_step + self.max_staleness_steps

    def add_dropped(self, chosen: Sequence[OpenGroup]) -> list[OpenGroup]:
        """The chosen groups and what was dropped since the last step, by number."""
        dropped = [g for g in self._groups.values() if g.is_dropped and g.trained_step is None]
        return sorted([*chosen, *dropped], key=lambda group: group.number)

    def assign(self, step: int, groups: Sequence[OpenGroup]) -> None:
        """`step` trains on these, or reports them as dropped."""
        for group in groups:
            group.trained_step = step
        self._finished = [group for group in self._finished if group.trained_step is None]

    def forget_trained(self, step: int) -> None:
        """`step` is complete."""
        trained = [g for g in self._groups.values() if g.trained_step is not None]
        for group in trained:
            if group.trained_step is not None and group.trained_step <= step:
                self._n_replaced += group.is_dropped
                del self._groups[group.number]

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a run needs that resumes after `step`: no prompt is lost, and none trained on twice."""
        done = [g for g in self._groups.values() if (g.trained_step or step + 1) <= step]
        numbers = {group.number for group in done}
        return {
            "next_number": self._next_number,
            "n_replaced": self._n_replaced + sum(group.is_dropped for group in done),
            "groups": [
                [number, group.task.key]
                for number, group in self._groups.items()
                if number not in numbers
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next_number = state.get("next_number", 0)
        self._n_replaced = state.get("n_replaced", 0)
        self._groups, self._finished = {}, []
        for number, key in state.get("groups", ()):
            if key not in self._tasks:
                raise CheckpointError(
                    f"the run has an open group of task {key!r}, which data.train_data (tasks= in "
                    "Python) does not have any more; resume with the same tasks"
                )
            self._groups[number] = OpenGroup(number=number, task=self._tasks[key])
