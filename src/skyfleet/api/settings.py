"""Settings as objects: algorithms, sampling and LoRA, each a set of configuration keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from skyfleet.api.arguments import explain_arguments
from skyfleet.api.custom_algorithms import Loss, register_advantage, register_loss
from skyfleet.errors import ConfigError

_ALGORITHM = "trainer.algorithm"


@explain_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """The base of the algorithm settings. A field that is None keeps the configuration's value.

    >>> import skyfleet as sf
    >>> sf.Algorithm(advantage="reinforce++", entropy=0.01).overrides()["trainer.algorithm.use_entropy_loss"]
    True
    """

    group_size: int | None = None
    """Attempts per task: generator.n_samples_per_prompt."""
    kl: float | None = None
    """Coefficient of the KL term in the loss; 0 needs no reference model."""
    clip: float | tuple[float, float] | None = None
    """How far the ratio may move below and above 1."""
    advantage: str | Callable[..., Any] | None = None
    """An estimator: a name, or a function made with `sf.estimator`."""
    loss: str | Loss | Callable[..., Any] | None = None
    """A policy loss: a name, or a function made with `sf.loss`."""
    loss_reduction: str | None = None
    entropy: float | None = None
    """Coefficient of the entropy bonus; 0 switches it off."""

    preset: ClassVar[Mapping[str, Any]] = {}
    """Keys that name the algorithm."""

    def overrides(self) -> dict[str, Any]:
        """The configuration keys that these settings set."""
        keys = dict(self.preset)
        if self.group_size is not None:
            keys["generator.n_samples_per_prompt"] = self.group_size
        if self.kl is not None:
            keys |= {f"{_ALGORITHM}.use_kl_loss": self.kl > 0}
            keys |= {f"{_ALGORITHM}.kl_loss_coef": self.kl} if self.kl > 0 else {}
        if self.clip is not None:
            keys |= self._clip_keys(*_pair(self.clip))
        if self.loss_reduction is not None:
            keys[f"{_ALGORITHM}.loss_reduction"] = self.loss_reduction
        if self.entropy is not None:
            keys |= {f"{_ALGORITHM}.use_entropy_loss": self.entropy > 0}
            keys |= {f"{_ALGORITHM}.entropy_loss_coef": self.entropy} if self.entropy > 0 else {}
        return keys | register_advantage(self.advantage) | register_loss(self.loss)

    def _clip_keys(self, low: float, high: float) -> dict[str, Any]:
        return {f"{_ALGORITHM}.eps_clip_low": low, f"{_ALGORITHM}.eps_clip_high": high}


@explain_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(Algorithm):
    """Group-relative policy optimization: an attempt is compared with the others at its task.

    >>> import skyfleet as sf
    >>> sf.GRPO(group_size=8, kl=0.001, clip=(0.2, 0.28)).overrides()["generator.n_samples_per_prompt"]
    8
    """

    scale_by_std: bool | None = None
    """Divide advantages by the group's standard deviation; False is Dr. GRPO's."""
    preset: ClassVar[Mapping[str, Any]] = {f"{_ALGORITHM}.advantage_estimator": "grpo"}

    def overrides(self) -> dict[str, Any]:
        keys = Algorithm.overrides(self)
        if self.scale_by_std is not None:
            keys[f"{_ALGORITHM}.grpo_norm_by_std"] = self.scale_by_std
        return keys


@explain_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class RLOO(Algorithm):
    """REINFORCE leave-one-out: an attempt is compared with the mean of the others.

    >>> import skyfleet as sf
    >>> sf.RLOO(group_size=4).overrides()["trainer.algorithm.advantage_estimator"]
    'rloo'
    """

    preset: ClassVar[Mapping[str, Any]] = {f"{_ALGORITHM}.advantage_estimator": "rloo"}


@explain_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class DAPO(Algorithm):
    """GRPO with clip-higher, dynamic sampling, overlong filtering and no KL (arXiv 2503.14476).

    >>> import skyfleet as sf
    >>> sf.DAPO(group_size=16).overrides()["trainer.algorithm.dynamic_sampling.type"]
    'filter'
    """

    preset: ClassVar[Mapping[str, Any]] = {
        f"{_ALGORITHM}.advantage_estimator": "grpo",
        f"{_ALGORITHM}.use_kl_loss": False,
        f"{_ALGORITHM}.eps_clip_low": 0.2,
        f"{_ALGORITHM}.eps_clip_high": 0.28,
        f"{_ALGORITHM}.dynamic_sampling.type": "filter",
        f"{_ALGORITHM}.loss_reduction": "token_mean",
        "generator.apply_overlong_filtering": True,
    }


@explain_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(Algorithm):
    """Ratios per sequence instead of per token (arXiv 2507.18071).

    >>> import skyfleet as sf
    >>> sf.GSPO().overrides()["trainer.algorithm.policy_loss_type"]
    'gspo'
    """

    preset: ClassVar[Mapping[str, Any]] = {
        f"{_ALGORITHM}.advantage_estimator": "grpo",
        f"{_ALGORITHM}.policy_loss_type": "gspo",
        f"{_ALGORITHM}.loss_reduction": "sequence_mean",
        f"{_ALGORITHM}.eps_clip_low": 3e-4,
        f"{_ALGORITHM}.eps_clip_high": 4e-4,
    }


@explain_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO(Algorithm):
    """Clips the importance weight, not the gradient (arXiv 2506.13585).

    >>> import skyfleet as sf
    >>> sf.CISPO(clip=(1.0, 4.0)).overrides()["trainer.algorithm.cispo.cispo_eps_clip_high"]
    4.0
    """

    preset: ClassVar[Mapping[str, Any]] = {
        f"{_ALGORITHM}.advantage_estimator": "grpo",
        f"{_ALGORITHM}.policy_loss_type": "cispo",
    }

    def _clip_keys(self, low: float, high: float) -> dict[str, Any]:
        prefix = f"{_ALGORITHM}.cispo.cispo_eps_clip"
        return {f"{prefix}_low": low, f"{prefix}_high": high}


@explain_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class PPO(Algorithm):
    """PPO with a critic and generalized advantage estimation; the critic starts as the policy.

    >>> import skyfleet as sf
    >>> sf.PPO(group_size=1, gae_lambda=0.95).overrides()["trainer.algorithm.lambd"]
    0.95
    """

    gamma: float | None = None
    gae_lambda: float | None = None
    preset: ClassVar[Mapping[str, Any]] = {
        f"{_ALGORITHM}.advantage_estimator": "gae",
        "trainer.critic.model.path": "${trainer.policy.model.path}",
    }

    def overrides(self) -> dict[str, Any]:
        given = {"gamma": self.gamma, "lambd": self.gae_lambda}
        return Algorithm.overrides(self) | {
            f"{_ALGORITHM}.{name}": value for name, value in given.items() if value is not None
        }


@explain_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled; a field that is None keeps the configuration's value.

    >>> import skyfleet as sf
    >>> sf.Sampling(temperature=0.7, max_tokens=256)
    Sampling(temperature=0.7, max_tokens=256, top_p=None, top_k=None, min_p=None, stop=None)
    """

    temperature: float | None = None
    max_tokens: int | None = None
    """Tokens per turn."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] | list[str] | None = None

    def overrides(self, section: str = "generator.sampling_params") -> dict[str, Any]:
        values = {
            "temperature": self.temperature,
            "max_generate_length": self.max_tokens,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "stop": None if self.stop is None else list(self.stop),
        }
        return {f"{section}.{name}": value for name, value in values.items() if value is not None}


@explain_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """Train low-rank adapters instead of every weight.

    >>> import skyfleet as sf
    >>> sf.LoRA(rank=32).overrides()["trainer.policy.model.lora.rank"]
    32
    """

    rank: int = 32
    alpha: int | None = None
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None

    def overrides(self) -> dict[str, Any]:
        values = {
            "rank": self.rank,
            "alpha": self.alpha,
            "target_modules": self.target_modules,
            "exclude_modules": self.exclude_modules,
        }
        prefix = "trainer.policy.model.lora"
        return {f"{prefix}.{name}": value for name, value in values.items() if value is not None}


def _pair(clip: float | tuple[float, float]) -> tuple[float, float]:
    if isinstance(clip, int | float):
        return clip, clip
    if not isinstance(clip, Sequence) or isinstance(clip, str) or len(clip) != 2:
        raise ConfigError(f"clip={clip!r:.60}: pass a number, or two: how far below 1 and above it")
    low, high = clip
    return low, high


def check_sampling(where: str, argument: str, given: object) -> None:
    if given is not None and not isinstance(given, Sampling):
        raise ConfigError(
            f"{where}({argument}={given!r:.60}): pass sf.Sampling(temperature=..., max_tokens=...)"
        )


def check_algorithm(where: str, given: object) -> None:
    if inspect.isclass(given) and issubclass(given, Algorithm):
        name = given.__name__
        raise ConfigError(f"{where}(algorithm=sf.{name}): call it: algorithm=sf.{name}()")
    if given is not None and not isinstance(given, str | Algorithm):
        raise ConfigError(
            f"{where}(algorithm={given!r:.60}): pass an algorithm such as sf.GRPO(), or the name of "
            "an advantage estimator"
        )


def as_lora(where: str, given: object) -> LoRA | None:
    """True is the default LoRA, a number its rank."""
    if given is None or given is False:
        return None
    if isinstance(given, LoRA):
        return given
    if isinstance(given, int):
        return LoRA() if given is True else LoRA(rank=given)
    raise ConfigError(f"{where}(lora={given!r:.60}): pass sf.LoRA(rank=32), or the rank")
