"""Sample: one token sequence with credit, ready to learn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    task_key: str
    env_key: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True where the policy chose the token."""
    logprobs: tuple[float, ...]
    """Of the policy that sampled; zero where it did not."""
    old_logprobs: tuple[float, ...] = ()
    """Of the policy as the step began; empty where `logprobs` stand for them."""
    advantages: tuple[float, ...]
    policy_version: int
    """The oldest that spoke in it."""
    attempt: int = 0
    """Which of its group's graded attempts it is of."""
    group_rewards: tuple[float, ...] = ()
    """Of every graded attempt at the task, those that teach nothing themselves included."""
    penalties: tuple[float, ...] = ()
    """What each token takes off the reward; empty where nothing is taken off."""
    values: tuple[float, ...] = ()
    """What a critic expected, before each token, to follow; empty where there is no critic."""
    returns: tuple[float, ...] = ()
    """What it should have expected."""

    def __post_init__(self) -> None:
        lengths = {
            len(self.token_ids),
            len(self.loss_mask),
            len(self.logprobs),
            len(self.advantages),
        }
        if len(lengths) != 1:
            raise ValueError(f"task {self.task_key}: tokens, mask, logprobs, advantages disagree")
        optional = (self.old_logprobs, self.penalties, self.values, self.returns)
        if any(given and len(given) != len(self.token_ids) for given in optional):
            raise ValueError(f"task {self.task_key}: old logprobs, penalties or values disagree")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError(f"task {self.task_key}: the first token has nothing to predict it")

    @property
    def runs(self) -> list[tuple[int, int]]:
        """From where up to where the policy spoke, turn after turn."""
        return runs_of(self.loss_mask)

    @property
    def n_action_tokens(self) -> int:
        return self.loss_mask.count(True)

    def select_action_tokens(self, values: Sequence[float]) -> list[float]:
        """Of one value a token, those of the chosen ones."""
        return list(compress(values, self.loss_mask))

    def spread(self, values: Iterable[float]) -> tuple[float, ...]:
        """From one value a chosen token, one a token: zero where the policy did not choose."""
        each = iter(values)
        return tuple(next(each) if chosen else 0.0 for chosen in self.loss_mask)


def runs_of(loss_mask: Sequence[bool]) -> list[tuple[int, int]]:
    """`runs_of([False, True, True, False, True])` is `[(1, 3), (4, 5)]`."""
    # As bytes, because a step looks through a hundred thousand.
    marks = bytes(loss_mask) + b"\0"
    runs: list[tuple[int, int]] = []
    begin = marks.find(1)
    while begin >= 0:
        end = marks.find(0, begin)
        runs.append((begin, end))
        begin = marks.find(1, end)
    return runs
