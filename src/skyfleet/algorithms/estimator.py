"""The interface of an advantage estimator: how it is called, and the facts that others read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from skyfleet.algorithms.sample import Sample
from skyfleet.config.algorithm import Algorithm
from skyfleet.config.imports import bind_kwargs
from skyfleet.config.root import RunConfig

ESTIMATOR_KEY = "trainer.algorithm.advantage_estimator"

GroupEstimator = Callable[[Sequence[float]], list[float]]
"""The rewards of one group -> one advantage per attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEstimator:
    """Wraps a function of all samples of a batch that returns them with advantages."""

    credit: Callable[[Sequence[Sample]], list[Sample]]


Estimator = GroupEstimator | BatchEstimator

Scope = Literal["group", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """An estimator and its facts. Validation, unused-key warnings and sentinels read the facts."""

    name: str
    scope: Scope
    """group: advantages come from the rewards of one group. batch: from all samples of a batch."""
    build: Callable[[Algorithm], Estimator]
    """The estimator with the settings of a configuration."""
    reads: tuple[str, ...] = ()
    """Keys under `trainer` that only estimators read, of those that this one reads."""
    needs_critic: bool = False
    needs_teacher: bool = False
    """It learns from the KL to `trainer.ref.model.path`, token by token, instead of rewards."""
    centred: Scope | None = None
    """Over what its advantages sum to zero; None makes no promise."""
    unit_deviation: Callable[[Algorithm], bool] = lambda _: False
    """Whether the advantages of a group have standard deviation 1."""
    errors: Callable[[RunConfig], Iterator[str]] = lambda _: iter(())
    """Why a configuration cannot run with it."""
    warnings: Callable[[RunConfig], Iterator[str]] = lambda _: iter(())
    """What in a configuration is likely a mistake with it."""

    @property
    def min_group_size(self) -> int:
        """Graded attempts that a group needs to be trained on."""
        return 2 if self.scope == "group" else 1


def find_equal_rewards_filter(config: RunConfig) -> str | None:
    """The setting, if any, that drops groups whose attempts all earned the same reward."""
    algorithm, kind = config.trainer.algorithm, config.trainer.algorithm.dynamic_sampling.type
    if config.generator.n_samples_per_prompt == 1:
        return None  # a single attempt is always kept
    if kind is not None:
        return f"trainer.algorithm.dynamic_sampling.type={kind}"
    if algorithm.zero_variance_filter:
        return "trainer.algorithm.zero_variance_filter=true"
    rules = config.trainer.fully_async
    refills = rules.enabled and rules.sample_full_batch
    return "trainer.fully_async.sample_full_batch=true" if refills else None


def estimator_from_function(
    function: Callable[..., list[float]] | Callable[..., list[Sample]],
    *,
    name: str,
    scope: Scope = "group",
    key_value: str | None = None,
) -> AdvantageEstimator:
    """An estimator from `f(rewards) -> advantages` or, with scope "batch", `f(samples) -> samples`.

    `trainer.algorithm.advantage_estimator_kwargs` are its keyword arguments. `key_value` is the
    value of the key in error messages, if it is not `python:name`.
    """

    def build(algorithm: Algorithm) -> Estimator:
        call = bind_kwargs(
            function,
            algorithm.advantage_estimator_kwargs,
            named=f"{ESTIMATOR_KEY}={key_value or f'python:{name}'!r}",
            key=f"{ESTIMATOR_KEY}_kwargs",
            takes="a group's rewards" if scope == "group" else "a batch's samples",
        )
        return call if scope == "group" else BatchEstimator(credit=call)

    return AdvantageEstimator(
        name=name, scope=scope, build=build, reads=("algorithm.advantage_estimator_kwargs",)
    )
