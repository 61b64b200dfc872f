"""Sample: one token sequence with its loss mask, logprobs and advantages, ready to train on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress

from skyfleet.terminal import add_note

_N_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence. Action tokens are those the policy sampled; the others are its observations.

    An estimator with `scope="batch"` gets all samples of a step and returns them with advantages:

    >>> import dataclasses, skyfleet as sf
    >>> @sf.estimator(scope="batch")
    ... def raw_rewards(samples):
    ...     return [
    ...         dataclasses.replace(s, advantages=s.scatter_to_tokens(
    ...             [s.group_rewards[s.attempt]] * s.n_action_tokens))
    ...         for s in samples
    ...     ]
    >>> sample = sf.Sample(
    ...     task_key="sum", env_key="env", token_ids=(5, 6, 7), loss_mask=(False, True, True),
    ...     logprobs=(0.0, -0.5, -0.1), advantages=(0.0, 0.0, 0.0), policy_version=0,
    ...     attempt=1, group_rewards=(0.0, 1.0))
    >>> raw_rewards([sample])[0].advantages
    (0.0, 1.0, 1.0)
    """

    task_key: str
    env_key: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True for action tokens."""
    logprobs: tuple[float, ...]
    """Logprobs under the sampling policy; 0 for observation tokens."""
    old_logprobs: tuple[float, ...] = ()
    """Logprobs under the policy at the start of the step; empty if `logprobs` are used instead."""
    advantages: tuple[float, ...]
    policy_version: int
    """The oldest version that sampled one of its turns."""
    attempt: int = 0
    """Index of its attempt among the graded attempts of the group."""
    group_rewards: tuple[float, ...] = ()
    """Rewards of all graded attempts at the task, including attempts left out of the loss."""
    step_rewards: tuple[float, ...] = ()
    """The environment's reward for each of its turns, one per action span: how the reward of the
    attempt breaks down by turn, before filters and penalties change that reward. Empty without
    turns, as in a warm start."""
    penalties: tuple[float, ...] = ()
    """Subtracted from the reward, per token; empty without KL in the reward."""
    values: tuple[float, ...] = ()
    """The critic's value before each token; empty without a critic."""
    returns: tuple[float, ...] = ()
    """The critic's targets."""

    def __post_init__(self) -> None:
        lengths = {
            len(self.token_ids),
            len(self.loss_mask),
            len(self.logprobs),
            len(self.advantages),
        }
        if len(lengths) != 1:
            raise ValueError(
                f"task {self.task_key}: tokens, mask, logprobs and advantages differ in length"
            )
        optional = (self.old_logprobs, self.penalties, self.values, self.returns)
        if any(given and len(given) != len(self.token_ids) for given in optional):
            raise ValueError(
                f"task {self.task_key}: old logprobs, penalties or values differ in length"
            )
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError(
                f"task {self.task_key}: the first token cannot be an action token, because no "
                "token before it predicts it"
            )

    @property
    def action_spans(self) -> list[tuple[int, int]]:
        """Start and end of each run of action tokens, one per turn."""
        return find_action_spans(self.loss_mask)

    @property
    def n_action_tokens(self) -> int:
        return self.loss_mask.count(True)

    def select_action_tokens(self, values: Sequence[float]) -> list[float]:
        """Of one value per token, those of the action tokens."""
        return list(compress(values, self.loss_mask))

    def scatter_to_tokens(self, values: Iterable[float]) -> tuple[float, ...]:
        """From one value per action token, one per token: 0 for observation tokens."""
        each = iter(values)
        return tuple(next(each) if is_action else 0.0 for is_action in self.loss_mask)


@contextmanager
def name_samples(samples: Sequence[Sample]) -> Iterator[None]:
    """Add to an exception of the block, such as one in a user's loss, which samples it had."""
    try:
        yield
    except Exception as error:
        named = [f"task {s.task_key}, attempt {s.attempt}" for s in samples[:_N_NAMED]]
        more = f" and {len(samples) - _N_NAMED} more" if len(samples) > _N_NAMED else ""
        add_note(error, f"raised on {len(samples)} samples: {'; '.join(named)}{more}")
        raise


def find_action_spans(loss_mask: Sequence[bool]) -> list[tuple[int, int]]:
    """`find_action_spans([False, True, True, False, True])` is `[(1, 3), (4, 5)]`."""
    # `bytes.find` is fast: a step searches masks of a hundred thousand tokens.
    marks = bytes(loss_mask) + b"\0"
    spans: list[tuple[int, int]] = []
    begin = marks.find(1)
    while begin >= 0:
        end = marks.find(0, begin)
        spans.append((begin, end))
        begin = marks.find(1, end)
    return spans
