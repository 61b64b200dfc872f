"""A user's own advantage estimators and policy losses, as objects a configuration can name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal, overload

from skyfleet.errors import ConfigError

_ALGORITHM = "trainer.algorithm"
Scope = Literal["group", "batch"]


class Estimator:
    """An advantage estimator made by `sf.estimator`; callable like its function."""

    def __init__(
        self, function: Callable[..., Any], scope: Scope, settings: Mapping[str, Any]
    ) -> None:
        self.function, self.scope, self.settings = function, scope, dict(settings)
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = inspect.getdoc(function)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """With the rewards: the advantages. With keywords alone: the estimator with new settings."""
        if not args:
            return Estimator(self.function, self.scope, {**self.settings, **settings})
        return self.function(*args, **{**self.settings, **settings})

    def __repr__(self) -> str:
        return f"estimator({self.__name__}, scope={self.scope!r})"


class Loss:
    """A policy loss made by `sf.loss`; `my_loss(clip=0.1)` is the same loss with that setting."""

    def __init__(
        self, function: Callable[..., Any], metrics: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        self.function, self.metrics, self.settings = function, tuple(metrics), dict(settings)
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = inspect.getdoc(function)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """With LossInputs: the LossOutput. With keywords alone: the loss with new settings."""
        if not args:
            return Loss(self.function, self.metrics, {**self.settings, **settings})
        return self.function(*args, **{**self.settings, **settings})

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{self.__name__}({settings})"


@overload
def estimator(function: Callable[..., Any], *, scope: Scope = ...) -> Estimator: ...
@overload
def estimator(*, scope: Scope = ...) -> Callable[[Callable[..., Any]], Estimator]: ...
def estimator(function: Callable[..., Any] | None = None, *, scope: Scope = "group") -> Any:
    """Make an advantage estimator of a function from rewards to advantages.

    With `scope="group"` it gets the rewards of one task's attempts and returns one advantage per
    attempt. With `scope="batch"` it gets all `sf.Sample`s of a step and returns them with advantages.

    >>> import skyfleet as sf
    >>> @sf.estimator
    ... def leave_best_out(rewards):
    ...     best = max(rewards)
    ...     return [reward - best for reward in rewards]
    >>> leave_best_out([1.0, 0.0])
    [0.0, -1.0]
    >>> algorithm = sf.GRPO(group_size=4, advantage=leave_best_out)
    """
    if scope not in ("group", "batch"):
        raise ConfigError(f"sf.estimator(scope={scope!r}): choose 'group' or 'batch'")
    if function is None:
        return partial(estimator, scope=scope)
    _check_takes_one(function, "sf.estimator", "the rewards")
    return Estimator(function, scope, {})


@overload
def loss(function: Callable[..., Any], *, metrics: Sequence[str] = ...) -> Loss: ...
@overload
def loss(*, metrics: Sequence[str] = ...) -> Callable[[Callable[..., Any]], Loss]: ...
def loss(function: Callable[..., Any] | None = None, *, metrics: Sequence[str] = ()) -> Any:
    """Make a policy loss of a function from `LossInputs` to `LossOutput`.

    Keyword arguments of the function are its settings; `metrics` names the metrics it returns.

    >>> import skyfleet as sf
    >>> @sf.loss(metrics=["weight"])
    ... def weighted(inputs: sf.LossInputs, *, scale: float = 1.0) -> sf.LossOutput:
    ...     loss_T = -scale * inputs.logprobs_T * inputs.advantages_T
    ...     return sf.LossOutput(loss_T=loss_T, metrics_T={"weight": loss_T.detach()})
    >>> weighted(scale=0.5)
    weighted(scale=0.5)
    >>> algorithm = sf.GRPO(loss=weighted(scale=0.5))
    """
    if function is None:
        return partial(loss, metrics=metrics)
    _check_takes_one(function, "sf.loss", "LossInputs")
    return Loss(function, metrics, {})


def register_advantage(advantage: object) -> dict[str, Any]:
    """The configuration keys that select an estimator given by name or as an object."""
    key = f"{_ALGORITHM}.advantage_estimator"
    if advantage is None or isinstance(advantage, str):
        return {} if advantage is None else {key: advantage}
    own = advantage if isinstance(advantage, Estimator) else estimator(advantage)  # type: ignore[call-overload]
    return {key: _register_estimator(own), f"{key}_kwargs": own.settings}


def register_loss(given: object) -> dict[str, Any]:
    """The configuration keys that select a policy loss given by name or as an object."""
    key = f"{_ALGORITHM}.policy_loss"
    if given is None or isinstance(given, str):
        return {} if given is None else {f"{key}_type": given}
    own = given if isinstance(given, Loss) else loss(given)  # type: ignore[call-overload]
    return {f"{key}_type": _register_loss(own), f"{key}_kwargs": own.settings}


def _register_estimator(own: Estimator) -> str:
    from skyfleet.algorithms.estimator import estimator_from_function
    from skyfleet.algorithms.registry import register_estimator as register

    name = _choose_name(own.__name__, own.function, _estimators)
    return register(estimator_from_function(own.function, name=name, scope=own.scope))


def _register_loss(own: Loss) -> str:
    from skyfleet.algorithms.losses.loss import loss_from_function
    from skyfleet.algorithms.registry import register_policy_loss

    metrics = own.metrics or None
    name = _choose_name(own.__name__, own.function, _losses)
    return register_policy_loss(loss_from_function(own.function, name=name, metrics=metrics))


_estimators: dict[str, Callable[..., Any]] = {}
_losses: dict[str, Callable[..., Any]] = {}
"""The functions that were registered, by name."""


def _choose_name(
    name: str, function: Callable[..., Any], registered: dict[str, Callable[..., Any]]
) -> str:
    """The name, with a number if another function holds it."""
    names = (name if n == 1 else f"{name}_{n}" for n in count(1))
    chosen = next(n for n in names if n not in registered or _is_same(function, registered[n]))
    registered[chosen] = function
    return chosen


def _is_same(one: Any, other: Any) -> bool:
    """Whether it is one function, also if its module or notebook cell was run again."""
    if one is other:
        return True
    names = [
        (getattr(f, "__module__", None), getattr(f, "__qualname__", None)) for f in (one, other)
    ]
    if names[0] != names[1] or names[0][1] is None:
        return False
    if "<" not in str(names[0][1]):
        return True
    # A function inside another: the same code with the same values is the same function.
    return _describe_function(one) == _describe_function(other)


def _describe_function(function: Any) -> tuple[Any, ...]:
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    plain = (bool, int, float, str, type(None))
    return function.__code__, [v if isinstance(v, plain) else id(v) for v in values]


def _check_takes_one(function: object, where: str, what: str) -> None:
    if not callable(function):
        raise ConfigError(
            f"{where}: {function!r:.80} is not a function; decorate one that takes {what}"
        )
    parameters = list(inspect.signature(function).parameters.values())
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(required) != 1:
        name, taken = getattr(function, "__name__", function), ", ".join(p.name for p in parameters)
        raise ConfigError(
            f"{where}: {name} takes ({taken}); it takes {what} and settings with defaults"
        )
