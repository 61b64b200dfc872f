"""Curriculum: draw tasks that are sometimes solved more often than those always or never solved.

With p the recent pass rate of a task, its weight is `floor + (1 - floor) * 4 p (1 - p)`: the
variance of a pass, which is the learning signal of a group, scaled so that p = 1/2 has weight 1. The
counts behind p decay by `decay` with every new group. A prior of one pass and one failure gives an
untried task the weight 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from random import Random
from types import MappingProxyType
from typing import Any

from skyfleet.errors import CheckpointError
from skyfleet.tasks.mixture import Mixture
from skyfleet.tasks.sampling import check_batch_size, check_identity, describe_sampler
from skyfleet.tasks.task import Task, TaskSet


class Curriculum:
    def __init__(self, *, decay: float = 0.8, floor: float = 0.1) -> None:
        """`floor` is the weight of a task that is always or never solved."""
        self._settings = {"decay": decay, "floor": floor}
        self._counts: dict[str, tuple[float, float]] = {}

    def observe(self, key: str, *, passed: int, failed: int) -> None:
        """Record one group of attempts; ungraded attempts are in neither number."""
        decay = self._settings["decay"]
        before_passed, before_failed = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = (decay * before_passed + passed, decay * before_failed + failed)

    def pass_rate(self, key: str) -> float:
        passed, failed = self._counts.get(key, (0.0, 0.0))
        return (passed + 1) / (passed + failed + 2)

    def weight(self, key: str) -> float:
        rate, floor = self.pass_rate(key), self._settings["floor"]
        return floor + (1 - floor) * 4 * rate * (1 - rate)

    def weights(self, tasks: Iterable[Task]) -> list[float]:
        return [self.weight(task.key) for task in tasks]

    def state_dict(self) -> dict[str, Any]:
        counts = {key: list(pair) for key, pair in sorted(self._counts.items())}
        return {**self._settings, "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the curriculum was saved with {name}={state.get(name)!r}, now it is "
                    f"{value!r}; resume with the saved value"
                )
        self._counts = {key: (passed, failed) for key, (passed, failed) in state["counts"].items()}


class CurriculumSampler:
    """Draws every batch from all tasks, by weight and without replacement.

    Every batch has at least `min_per_env` tasks of each env, or with mixture `weights` as many as
    these give it. An epoch is only a count here: as many draws as there are tasks.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        batch_size: int,
        seed: int,
        min_per_env: int = 0,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._tasks = sorted(TaskSet(tasks), key=lambda task: task.key)
        self._batch_size, self._seed, self._min_per_env = batch_size, seed, min_per_env
        check_batch_size(self._tasks, batch_size, min_per_env)
        self._curriculum = Curriculum()
        self._n_batches = 0
        self._weights = dict(sorted(weights.items()))
        self._mixture = self._start_mixture()

    @property
    def epoch(self) -> int:
        return self._n_batches * self._batch_size // len(self._tasks)

    def draw(self) -> list[Task]:
        rng = Random(f"{self._seed}/curriculum/{self._n_batches}")
        self._n_batches += 1
        at_least = self._mixture.next_counts() if self._mixture else {}
        # Weighted sampling without replacement: the largest u ** (1 / weight) first (Efraimidis and
        # Spirakis, 2006).
        weights = self._curriculum.weights(self._tasks)
        ranks = [rng.random() ** (1 / weight) for weight in weights]
        order = sorted(range(len(ranks)), key=lambda index: -ranks[index])
        missing: dict[str, int] = defaultdict(lambda: self._min_per_env, at_least)
        first: list[int] = []
        for index in order:
            env_key = self._tasks[index].env_key
            if missing[env_key] > 0:
                missing[env_key] -= 1
                first.append(index)
        chosen = set(first)
        rest = [index for index in order if index not in chosen]
        return [self._tasks[index] for index in (*first, *rest)[: self._batch_size]]

    def observe(self, task_key: str, *, passed: int, failed: int) -> None:
        self._curriculum.observe(task_key, passed=passed, failed=failed)

    def state_dict(self) -> dict[str, Any]:
        curriculum = self._curriculum.state_dict()
        return self._identity() | {"n_batches": self._n_batches, "curriculum": curriculum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_identity(state, self._identity())
        self._n_batches = state["n_batches"]
        self._mixture = self._start_mixture()
        if self._mixture:
            self._mixture.skip(self._n_batches)
        self._curriculum.load_state_dict(state["curriculum"])

    def _start_mixture(self) -> Mixture | None:
        if not self._weights:
            return None
        return Mixture(
            self._tasks,
            self._weights,
            batch_size=self._batch_size,
            min_per_env=self._min_per_env,
        )

    def _identity(self) -> dict[str, Any]:
        identity = describe_sampler(
            self._tasks,
            batch_size=self._batch_size,
            seed=self._seed,
            min_per_env=self._min_per_env,
        )
        return identity | ({"env_weights": self._weights} if self._weights else {})
