"""Sample: one token sequence with credit, ready to learn from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    task_key: str
    env_key: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True where the policy chose the token."""
    logprobs: tuple[float, ...]
    """Of the policy that sampled; zero where it did not."""
    advantages: tuple[float, ...]
    policy_version: int
    """The oldest that spoke in it."""

    def __post_init__(self) -> None:
        lengths = {
            len(self.token_ids),
            len(self.loss_mask),
            len(self.logprobs),
            len(self.advantages),
        }
        if len(lengths) != 1:
            raise ValueError(f"task {self.task_key}: tokens, mask, logprobs, advantages disagree")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError(f"task {self.task_key}: the first token has nothing to predict it")

    @property
    def n_chosen(self) -> int:
        return sum(self.loss_mask)
