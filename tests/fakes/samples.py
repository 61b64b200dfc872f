"""Random samples that look like groups: a shared prompt, then turns of the attempt's own."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from skyfleet.algorithms.sample import Sample


def sample(
    token_ids: Sequence[int],
    loss_mask: Sequence[bool],
    *,
    task_key: str = "t",
    advantage: float = 1.0,
    logprob: float = -2.0,
) -> Sample:
    return Sample(
        task_key=task_key,
        env_key="github",
        token_ids=tuple(token_ids),
        loss_mask=tuple(loss_mask),
        logprobs=tuple(logprob if chosen else 0.0 for chosen in loss_mask),
        advantages=tuple(advantage if chosen else 0.0 for chosen in loss_mask),
        policy_version=0,
    )


def random_group(task_key: str, *, size: int = 4, vocabulary: int = 64) -> list[Sample]:
    draw = Random(task_key)
    prompt = [draw.randrange(vocabulary) for _ in range(draw.randrange(4, 12))]
    samples = []
    for _ in range(size):
        tokens, mask = list(prompt), [False] * len(prompt)
        for _ in range(draw.randrange(1, 4)):
            given, chosen = draw.randrange(3), draw.randrange(1, 8)
            tokens += [draw.randrange(vocabulary) for _ in range(given + chosen)]
            mask += [False] * given + [True] * chosen
        advantage = draw.uniform(-1.5, 1.5)
        samples.append(sample(tokens, mask, task_key=task_key, advantage=advantage, logprob=-4.0))
    return samples


def random_groups(n_groups: int, **kwargs: int) -> list[Sample]:
    return [s for i in range(n_groups) for s in random_group(f"task-{i}", **kwargs)]
