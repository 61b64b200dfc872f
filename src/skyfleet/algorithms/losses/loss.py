"""The interface of a policy loss: its inputs, its output, and the facts that others read.

The modules of this package import torch inside functions, so that a configuration can be validated
against the facts of its loss where torch is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from skyfleet.config.algorithm import Algorithm
from skyfleet.config.imports import bind_kwargs
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

LOSS_KEY = "trainer.algorithm.policy_loss_type"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The action tokens of whole sequences, one entry per token; observation tokens are left out.

    `T` is the number of tokens, `B` the number of sequences.

    >>> import torch
    >>> import skyfleet as sf
    >>> inputs = sf.LossInputs(
    ...     tokens_T=torch.tensor([5, 7, 9]),
    ...     logprobs_T=torch.tensor([-1.0, -0.5, -2.0], requires_grad=True),
    ...     old_logprobs_T=torch.tensor([-1.0, -0.5, -2.0]),
    ...     behaviour_logprobs_T=torch.tensor([-1.0, -0.5, -2.0]),
    ...     advantages_T=torch.tensor([1.0, 1.0, -1.0]),
    ...     lengths_B=torch.tensor([2, 1]),
    ... )
    >>> ratio_T = (inputs.logprobs_T - inputs.old_logprobs_T).exp()
    >>> (-ratio_T * inputs.advantages_T).tolist()
    [-1.0, -1.0, 1.0]
    """

    tokens_T: Tensor
    logprobs_T: Tensor
    """Under the weights being trained; carries the gradient."""
    old_logprobs_T: Tensor
    """Under the policy at the start of the step, the anchor of the PPO ratio."""
    behaviour_logprobs_T: Tensor
    """Under the sampling policy, as the engine reported them."""
    advantages_T: Tensor
    """As the estimator computed them; the learner applies the reduction weights afterwards."""
    lengths_B: Tensor
    """Action tokens per sequence; sequences are concatenated."""
    selected_T: Tensor | None = None
    """Tokens that the loss's `Selector` picked, if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a policy loss returns: one loss per token, and metrics if it has any.

    >>> import skyfleet as sf
    >>> @sf.loss
    ... def reinforce(inputs: sf.LossInputs) -> sf.LossOutput:
    ...     loss_T = -inputs.logprobs_T * inputs.advantages_T
    ...     return sf.LossOutput(loss_T=loss_T, metrics_T={"nats": -inputs.logprobs_T.detach()})
    >>> algorithm = sf.GRPO(loss=reinforce)
    """

    loss_T: Tensor
    """Per token; the learner weights and sums."""
    metrics_T: dict[str, Tensor] = field(default_factory=dict)
    """Name -> one value per token, averaged over all action tokens."""
    metrics_B: dict[str, Tensor] = field(default_factory=dict)
    """Name -> one value per sequence, averaged over all sequences."""
    stats_T: dict[str, Tensor] = field(default_factory=dict)
    """Name -> one value per token, logged as `_mean`, `_std`, `_max` and `_min`."""


LossFunction = Callable[[LossInputs], LossOutput]

Selector = Callable[[LossInputs], "Tensor"]
"""Marks tokens of a whole mini-batch, for a loss that compares all of them."""


def metrics_at_ratio_one(values: Mapping[str, int]) -> Callable[[Algorithm], Mapping[str, str]]:
    """For `PolicyLoss.constant_metrics`: the values that metrics of the ratio have at ratio 1."""
    reasons = {
        name: f"stays {value} in this run: each batch is used for one update, and before it the new "
        "policy is the old one. Do not tune the learning rate by it; policy/policy_kl and the reward "
        "show what an update changes"
        for name, value in values.items()
    }
    return lambda _: reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A policy loss and its facts. Validation, unused-key warnings and sentinels read the facts."""

    name: str
    build: Callable[[Algorithm], LossFunction]
    """The loss with the settings of a configuration."""
    build_selector: Callable[[Algorithm], Selector] | None = None
    """For a loss that compares the tokens of a whole mini-batch; costs one more forward pass."""
    reads: tuple[str, ...] = ()
    """Keys under `trainer` that only losses read, of those that this one reads."""
    metrics: tuple[str, ...] | None = ()
    """Names it logs under `policy/`; None if they are unknown."""
    filter_metrics: tuple[str, ...] = ()
    """Those of its metrics that are 0 in every step only if a filter of the loss never acts."""
    ratio_to: Callable[[Algorithm], Literal["old", "engine"] | None] = lambda _: "old"
    """Whose logprobs its ratio compares with; None if it has no ratio."""
    old_ratio_setting: str | None = None
    """The setting, if there is one, that makes the ratio one to the old policy."""
    recomputes_old_logprobs: bool = False
    """The learner recomputes the old logprobs even if the engine's equal them up to rounding."""
    constant_metrics: Callable[[Algorithm], Mapping[str, str]] = lambda _: {}
    """Metrics that cannot vary with one update per batch -> why."""
    errors: Callable[[RunConfig], Iterator[str]] = lambda _: iter(())
    """Why a configuration cannot run with it."""
    warnings: Callable[[RunConfig], Iterator[str]] = lambda _: iter(())
    """What in a configuration is likely a mistake with it."""


def loss_from_function(
    function: Callable[..., LossOutput],
    *,
    name: str,
    metrics: tuple[str, ...] | None = None,
    key_value: str | None = None,
) -> PolicyLoss:
    """A loss from `f(inputs, *, settings) -> LossOutput`; its outputs are checked at every call.

    `trainer.algorithm.policy_loss_kwargs` are its keyword arguments. With `metrics` it may log
    those names only. `key_value` is the value of the key in error messages, if not `python:name`.
    """
    setting = f"{LOSS_KEY}={key_value or f'python:{name}'!r}"

    def build(algorithm: Algorithm) -> LossFunction:
        call = bind_kwargs(
            function,
            algorithm.policy_loss_kwargs,
            named=setting,
            key="trainer.algorithm.policy_loss_kwargs",
            takes="LossInputs",
        )
        return lambda inputs: _check_output(setting, call(inputs), inputs, metrics)

    return PolicyLoss(
        name=name, build=build, reads=("algorithm.policy_loss_kwargs",), metrics=metrics
    )


def _check_output(
    setting: str, output: Any, inputs: LossInputs, metrics: tuple[str, ...] | None
) -> LossOutput:
    """The output of a user's loss: a mean in place of one value per token would broadcast."""
    if not isinstance(output, LossOutput):
        raise ConfigError(f"{setting} returns a {type(output).__name__}; return a LossOutput")
    tokens, sequences = inputs.logprobs_T.shape, inputs.lengths_B.shape
    expected = [("loss_T", output.loss_T, tokens)]
    expected += [(f"metrics_T[{key!r}]", x, tokens) for key, x in output.metrics_T.items()]
    expected += [(f"metrics_B[{key!r}]", x, sequences) for key, x in output.metrics_B.items()]
    expected += [(f"stats_T[{key!r}]", x, tokens) for key, x in output.stats_T.items()]
    for field_name, values, shape in expected:
        if values.shape != shape:
            raise ConfigError(
                f"{setting} returned {field_name} of shape {tuple(values.shape)}, expected "
                f"{tuple(shape)}; leave the mean to trainer.algorithm.loss_reduction"
            )
    logged = {*output.metrics_T, *output.metrics_B, *output.stats_T}
    if metrics is not None and (undeclared := sorted(logged - set(metrics))):
        raise ConfigError(
            f"{setting} logs the metric {undeclared[0]!r}, which it does not declare; it declares "
            f"{sorted(metrics)}"
        )
    return output


def log_ratio(logprobs_T: Tensor, others_T: Tensor) -> Tensor:
    """Clamped to ±20, so that the ratio is finite."""
    return (logprobs_T - others_T).float().clamp(-20, 20)


def ratio(logprobs_T: Tensor, others_T: Tensor) -> Tensor:
    return log_ratio(logprobs_T, others_T).exp()


def sequence_sum(values_T: Tensor, lengths_B: Tensor) -> Tensor:
    """One sum per sequence, added up in the same order every time."""
    import torch

    return torch.segment_reduce(values_T, "sum", lengths=lengths_B)


def expand_to_tokens(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    """The value of each sequence on each of its tokens."""
    return values_B.repeat_interleave(lengths_B)
