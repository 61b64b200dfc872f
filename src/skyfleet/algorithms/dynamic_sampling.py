"""Dynamic sampling: a batch of groups that differ inside, however many have to be played for it.

The functions look at what a step has played so far and say what to learn from, or that another
batch is wanted. They remember nothing, so a step that is done over is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from skyfleet.algorithms.filters import Kept, drop_zero_variance
from skyfleet.errors import StarvedError
from skyfleet.trajectories.trajectory import Group
from skyfleet.trajectories.unknown import told_unknown


def merge_by_task(groups: Sequence[Group]) -> list[Group]:
    """A task that was drawn twice is one group of all its attempts."""
    merged: dict[str, Group] = {}
    for group in groups:
        before = merged.get(group.task_key)
        attempts = before.trajectories + group.trajectories if before else group.trajectories
        merged[group.task_key] = replace(group, trajectories=attempts)
    return list(merged.values())


def fill_batch(groups: Sequence[Group], *, batch_size: int, tolerance: float = 1e-6) -> Kept:
    """DAPO's (arXiv 2503.14476): the first `batch_size` informative groups of all played."""
    kept = drop_zero_variance(groups, tolerance=tolerance)
    surplus = max(len(kept.groups) - batch_size, 0)
    return Kept(
        groups=kept.groups[:batch_size],
        dropped=Counter({**kept.dropped, "surplus": surplus}),
        wants_more=len(kept.groups) < batch_size,
    )


def replace_uninformative(
    groups: Sequence[Group], *, batch_size: int, min_replace_ratio: float, tolerance: float = 1e-6
) -> Kept:
    """The informative groups of the last batch, and copies of them until the batch is full.

    Where not more than `min_replace_ratio` of the batch is informative, another is wanted. A copy
    has a key of its own: to whatever counts prompts it is one more.
    """
    kept = drop_zero_variance(groups, tolerance=tolerance)
    good = list(kept.groups)
    if len(good) <= min_replace_ratio * batch_size:
        return Kept(groups=(), dropped=kept.dropped, wants_more=True)
    # Seeded by what was played: a resumed step chooses the same.
    draw, missing = Random("/".join(group.task_key for group in groups)), batch_size - len(good)
    chosen = draw.sample(good, missing) if missing <= len(good) else draw.choices(good, k=missing)
    filled = [*good, *(_copy(group, number) for number, group in enumerate(chosen, 1))]
    draw.shuffle(filled)  # or else the last mini-batch would be all copies
    return Kept(groups=tuple(filled), dropped=Counter({**kept.dropped, "copied": missing}))


def check_sample_batches(
    kept: Kept, groups: Sequence[Group], *, batch_size: int, max_sample_batches: int
) -> None:
    """Give up where so many batches, all that was played, were not enough; -1 never does."""
    if not kept.wants_more or not 0 < max_sample_batches <= len(groups) // batch_size:
        return
    unknown = told_unknown(groups)
    raise StarvedError(
        f"trainer.algorithm.dynamic_sampling.max_sample_batches={max_sample_batches} batches "
        "did not hold enough groups whose attempts earned different rewards; "
        + (f"{unknown}; or " if unknown else "")
        + "raise it, raise generator.n_samples_per_prompt, or choose tasks that are neither too hard "
        "nor too easy"
    )


def _copy(group: Group, number: int) -> Group:
    key = f"{group.task_key} (copy {number})"
    trajectories = tuple(replace(t, task_key=key) for t in group.trajectories)
    return replace(group, task_key=key, trajectories=trajectories)
