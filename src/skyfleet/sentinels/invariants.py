"""Expected: what a run's configuration promises, as far as sentinels ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skyfleet.rollouts.episode import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariants:
    n_samples: int
    """Attempts a group."""
    batch_size: int
    """Prompts a batch."""
    limits: Limits
    envs: frozenset[str]
    """What is trained on."""
    min_per_env: int = 0
    dynamic_sampling: Literal["filter", "replace"] | None = None
    drops_equal_rewards: bool = False
    tolerance: float = 1e-6
    """Rewards this close count as the same."""
    mask_unfinished: bool = False
    changes_rewards: bool = False
    """Length or an early end costs reward before credit is given."""
    step_wise: bool = False
    """Each turn is a sample."""
    centred: Literal["group", "batch"] | None = "group"
    """Over what advantages sum to zero; None promises nothing."""
    unit_deviation: bool = False
    """And inside each group they deviate by one."""
    mini_batch_size: int
    """Prompts an optimiser step."""
    update_epochs: int = 1
    credited_again: Literal["group", "batch"] | None = None
    """Where the learner gives the credit itself (KL in reward, a critic): over what it is centred."""
    least_mass: float | None = 1.0
    """Of the vocabulary's, that the engine draws from; None: at another temperature than the learner."""
    logprob_tolerance: float = 1e-3
    """Mean distance of the two: where both compute alike they keep this, and elsewhere not."""
    reference_tolerance: float = 1e-3
    """The same of learner and reference, which no engine has a part in."""
    own_reference: bool = False
    """The KL's reference is the policy as it began."""
    reference_interval: int = -1
    """Steps after which it is the policy as it then is; -1 leaves it."""
    acting: tuple[str, ...] = ()
    """Metrics of filters that are on: one that stays zero filters nothing."""
