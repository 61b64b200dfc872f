"""Keyword arguments that several functions share, declared once as a TypedDict."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from math import inf
from numbers import Real
from typing import Any, TypeVar

from skyfleet.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

_GROUP_SIZE, _KL = "algorithm=sf.GRPO(group_size=...)", "algorithm=sf.GRPO(kl=...)"
_MAX_TOKENS = "sampling=sf.Sampling(max_tokens=...)"
CALL_ALIASES: Mapping[str, str] = {
    "learning_rate": "lr=",
    "max_steps": "steps=",
    "max_training_steps": "steps=",
    "num_train_epochs": "steps=",
    "epochs": "steps=",
    "per_device_train_batch_size": "batch_size=",
    "train_batch_size": "batch_size=",
    "reward_funcs": "reward=",
    "reward_fn": "reward=",
    "dataset": "tasks=",
    "train_dataset": "tasks=",
    "train_data": "tasks=",
    "eval_dataset": "eval=",
    "val_data": "eval=",
    "eval_interval": "eval_every=",
    "eval_steps": "eval_every=",
    "output_dir": "run_dir=",
    "report_to": "trackers=",
    "logger": "trackers=",
    "peft_config": "lora=",
    "num_generations": _GROUP_SIZE,
    "n_samples_per_prompt": _GROUP_SIZE,
    "group_size": _GROUP_SIZE,
    "beta": _KL,
    "kl": _KL,
    "max_completion_length": _MAX_TOKENS,
    "max_generate_length": _MAX_TOKENS,
    "max_new_tokens": _MAX_TOKENS,
    "max_tokens": _MAX_TOKENS,
    "temperature": "sampling=sf.Sampling(temperature=...)",
}
"""Names of TRL and SkyRL, and ours, as arguments of `sf.train` and `sf.evaluate`."""

SETTING_ALIASES: Mapping[str, str] = {
    "num_generations": "group_size",
    "n_samples_per_prompt": "group_size",
    "beta": "kl",
    "kl_loss_coef": "kl",
    "epsilon": "clip",
    "eps_clip_low": "clip",
    "eps_clip_high": "clip",
    "scale_rewards": "scale_by_std",
    "grpo_norm_by_std": "scale_by_std",
    "loss_type": "loss",
    "policy_loss_type": "loss",
    "advantage_estimator": "advantage",
    "lambd": "gae_lambda",
    "lam": "gae_lambda",
    "max_new_tokens": "max_tokens",
    "max_completion_length": "max_tokens",
    "max_generate_length": "max_tokens",
    "stop_strings": "stop",
    "r": "rank",
    "lora_alpha": "alpha",
}
"""The same for the fields of algorithms, `Sampling` and `LoRA`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """What a number may be; `None` is always allowed."""

    is_whole: bool = False
    least: float = -inf
    most: float = inf

    def check(self, where: str, name: str, value: object) -> None:
        """ConfigError for anything else; `where` is the call."""
        if value is None:
            return
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if is_number and not (self.is_whole and float(value) % 1) and not self._excludes(value):  # type: ignore[arg-type]
            return
        kind = "a whole number" if self.is_whole else "a number"
        bounds = f" of at least {self.least:g}" if self.least > -inf else ""
        bounds = f" from {self.least:g} to {self.most:g}" if self.most < inf else bounds
        raise ConfigError(f"{where}({name}={value!r:.60}): pass {kind}{bounds}")

    def _excludes(self, value: float) -> bool:
        return value < self.least or value > self.most  # NaN is left to the configuration


CALL_NUMBERS: Mapping[str, Number] = {
    "lr": Number(),
    "batch_size": Number(is_whole=True),
    "steps": Number(is_whole=True),
    "eval_every": Number(is_whole=True),
    "eval_attempts": Number(is_whole=True),
    "attempts": Number(is_whole=True),
    "seed": Number(is_whole=True),
}
"""Arguments of `sf.train` and `sf.evaluate`; the configuration has their bounds."""

SETTING_NUMBERS: Mapping[str, Number] = {
    "group_size": Number(is_whole=True, least=1),
    "kl": Number(least=0),
    "entropy": Number(least=0),
    "gamma": Number(least=0, most=1),
    "gae_lambda": Number(least=0, most=1),
    "temperature": Number(least=0),
    "max_tokens": Number(is_whole=True, least=1),
    "top_p": Number(least=0, most=1),
    "top_k": Number(is_whole=True, least=-1),
    "min_p": Number(least=0, most=1),
    "rank": Number(is_whole=True, least=0),
    "alpha": Number(is_whole=True, least=1),
}
"""The fields of algorithms, `Sampling` and `LoRA`, with the bounds of their keys."""


def show_arguments(declared: type) -> Callable[[F], F]:
    """Make `help()` and notebooks list the declared arguments instead of `**arguments`."""

    def decorate(function: F) -> F:
        shown = inspect.signature(function)
        named = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in declared.__annotations__
        ]
        function.__dict__["__signature__"] = shown.replace(parameters=[*named, *keywords])
        return function

    return decorate


def check_arguments(where: str, given: Mapping[str, Any], declared: type) -> None:
    """ConfigError for an argument that is not declared or no number; `where` is the call."""
    known = list(declared.__annotations__)
    for name in sorted(given.keys() - set(known)):
        alias = CALL_ALIASES.get(name, "")
        if alias.partition("=")[0] in known:
            raise ConfigError(f"{where}({name}=...) is not an argument; use {alias}")
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the arguments are {', '.join(known)};"
        raise ConfigError(
            f"{where}({name}=...) is not an argument; {hint} A configuration key is set by "
            f'config={{"key": value}}'
        )
    for name, number in CALL_NUMBERS.items():
        number.check(where, name, given.get(name))


def explain_arguments(cls: C) -> C:
    """Make a dataclass raise ConfigError, with the right name, for an argument that it lacks."""
    init, known = cls.__init__, [field.name for field in fields(cls)]  # type: ignore[misc]

    @wraps(init)
    def checked(self: object, *args: Any, **given: Any) -> None:
        where = f"sf.{type(self).__name__}"
        if args:
            raise ConfigError(f"{where}({args[0]!r:.60}): pass it by name; {_list(known)}")
        for name in given.keys() - set(known):
            alias = SETTING_ALIASES.get(name, "")
            near = [alias] if alias in known else get_close_matches(name, known, n=1)
            hint = f"use {near[0]}=" if near else _list(known)
            raise ConfigError(f"{where}({name}=...) is not an argument; {hint}")
        init(self, **given)
        for name in SETTING_NUMBERS.keys() & set(known):
            SETTING_NUMBERS[name].check(where, name, getattr(self, name))

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def _list(known: Sequence[str]) -> str:
    return f"the arguments are {', '.join(known)}"
