"""Mixture weights: how many prompts of each environment a batch has, and a sampler that keeps to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Any

from skyfleet.errors import ConfigError
from skyfleet.tasks.sampling import check_batch_size, check_identity, describe_sampler
from skyfleet.tasks.task import Task, TaskSet


class Mixture:
    """Splits every batch over the environments in proportion to their weights.

    An environment whose share is no integer gets the integer below it or the one above; over many
    batches its mean is the share. No environment gets fewer than `min_per_env` prompts: those whose
    weight gives less have exactly so many, and the others share the rest by weight.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        weights: Mapping[str, float],
        *,
        batch_size: int,
        min_per_env: int,
    ) -> None:
        """An environment that `weights` does not name has weight 1."""
        n_by_env = Counter(task.env_key for task in tasks)
        if unknown := sorted(weights.keys() - n_by_env.keys()):
            raise ConfigError(
                f"data.env_weights.{unknown[0]}={weights[unknown[0]]:g}, but data.train_data has no "
                f"task of this environment; choose from {sorted(n_by_env)}"
            )
        given = {env: Fraction(weights.get(env, 1.0)) for env in sorted(n_by_env)}
        self.shares = _split(given, batch_size, min_per_env)
        """Prompts of each environment per batch, on average."""
        for env, share in self.shares.items():
            if (most := -(-share.numerator // share.denominator)) > n_by_env[env]:
                raise ConfigError(
                    f"data.env_weights gives {env!r} up to {most} of the "
                    f"trainer.train_batch_size={batch_size} prompts of a batch, but it has only "
                    f"{n_by_env[env]} different tasks; lower its weight or add tasks"
                )
        self._n_batches = 0
        self._extras = dict.fromkeys(self.shares, 0)
        """How often each environment got the integer above its share."""

    def next_counts(self) -> dict[str, int]:
        """Prompts of each environment in the next batch."""
        self._n_batches += 1
        counts = {env: int(share) for env, share in self.shares.items()}
        deficits = {
            env: self._n_batches * (share - counts[env]) - self._extras[env]
            for env, share in self.shares.items()
        }
        missing = sum(self.shares.values()) - sum(counts.values())
        behind = sorted(counts, key=lambda env: (-deficits[env], env))
        for env in behind[: int(missing)]:
            counts[env] += 1
            self._extras[env] += 1
        return counts

    def skip(self, n_batches: int) -> None:
        """Continue behind so many batches."""
        for _ in range(n_batches):
            self.next_counts()


def _split(
    weights: Mapping[str, Fraction], batch_size: int, min_per_env: int
) -> dict[str, Fraction]:
    """The share of each environment; those below the minimum get it, the others the rest."""
    raised: set[str] = set()
    while True:
        rest = batch_size - min_per_env * len(raised)
        total = sum(weight for env, weight in weights.items() if env not in raised)
        shares = {
            env: Fraction(min_per_env) if env in raised else rest * weight / total
            for env, weight in weights.items()
        }
        below = {env for env, share in shares.items() if share < min_per_env}
        if not below:
            return shares
        raised |= below


class MixtureSampler:
    """Draws batches whose environments have the shares of `weights`.

    Each environment is a stream of its own, shuffled again after every pass, and no batch has a task
    twice. An environment with few tasks and a large weight repeats its tasks sooner; an epoch is
    only a count here: as many draws as there are tasks.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        batch_size: int,
        seed: int,
        weights: Mapping[str, float],
        min_per_env: int = 0,
    ) -> None:
        self._tasks = sorted(TaskSet(tasks), key=lambda task: task.key)
        self._batch_size, self._seed, self._min_per_env = batch_size, seed, min_per_env
        self._weights = dict(sorted(weights.items()))
        check_batch_size(self._tasks, batch_size, min_per_env)
        self._streams = self._start_streams()
        self._mixture = self._start_mixture()
        self._n_batches = 0

    @property
    def epoch(self) -> int:
        return self._n_batches * self._batch_size // len(self._tasks)

    def draw(self) -> list[Task]:
        counts = self._mixture.next_counts()
        rng = Random(f"{self._seed}/mixture/{self._n_batches}")
        self._n_batches += 1
        batch = [
            self._tasks[index]
            for env, count in counts.items()
            for index in self._streams[env].take(count)
        ]
        rng.shuffle(batch)
        return batch

    def observe(self, task_key: str, *, passed: int, failed: int) -> None:
        """Ignored: the weights decide alone."""

    def state_dict(self) -> dict[str, Any]:
        streams = {env: stream.state for env, stream in self._streams.items()}
        return self._identity() | {"n_batches": self._n_batches, "streams": streams}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_identity(state, self._identity())
        self._n_batches = state["n_batches"]
        self._mixture = self._start_mixture()
        self._mixture.skip(self._n_batches)
        for env, saved in state["streams"].items():
            self._streams[env].restore(saved)

    def _start_mixture(self) -> Mixture:
        return Mixture(
            self._tasks,
            self._weights,
            batch_size=self._batch_size,
            min_per_env=self._min_per_env,
        )

    def _start_streams(self) -> dict[str, _Stream]:
        indices: dict[str, list[int]] = {}
        for index, task in enumerate(self._tasks):
            indices.setdefault(task.env_key, []).append(index)
        return {env: _Stream(found, f"{self._seed}/{env}") for env, found in indices.items()}

    def _identity(self) -> dict[str, Any]:
        identity = describe_sampler(
            self._tasks,
            batch_size=self._batch_size,
            seed=self._seed,
            min_per_env=self._min_per_env,
        )
        return identity | {"env_weights": self._weights}


class _Stream:
    """The tasks of one environment, pass after pass."""

    def __init__(self, indices: Sequence[int], seed: str) -> None:
        self._indices, self._seed = indices, seed
        self._order: list[int] = []
        self._position = 0
        self._start_pass(0, [])

    def take(self, count: int) -> list[int]:
        """The next `count` tasks, each once; at most as many as there are."""
        taken = self._order[self._position : self._position + count]
        self._position += len(taken)
        if len(taken) < count:
            self._start_pass(self._number + 1, taken)
            self._position = count - len(taken)
            taken = [*taken, *self._order[: self._position]]
        return taken

    @property
    def state(self) -> dict[str, Any]:
        return {"pass": self._number, "position": self._position, "carried": self._carried}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._start_pass(state["pass"], state["carried"])
        self._position = state["position"]

    def _start_pass(self, number: int, carried: Sequence[int]) -> None:
        """Shuffle; tasks of the batch that ended the previous pass come last."""
        self._number, self._position, self._carried = number, 0, list(carried)
        order = list(self._indices)
        Random(f"{self._seed}/{number}").shuffle(order)
        self._order = sorted(order, key=set(carried).__contains__)
