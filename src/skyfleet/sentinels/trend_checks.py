"""What metrics show over several steps: most of it is seldom right, and sometimes only bad luck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from statistics import fmean

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Told

ENTROPY, MALFORMED = "policy/policy_entropy", "reward/parse_failure_rate"
LOSS, LR = ("policy/final_loss", "policy/grad_norm"), "policy/policy_lr"
REWARD = "generation/avg_reward"
"""Has no value in a step without a grade."""
COLLAPSED = 0.1
"""Share of the entropy at the beginning, the highest of the first steps."""
UNTRAINED = 0.6
"""Malformed turns, as a share of all, that a policy may begin with."""
JUMP = 0.3
"""More malformed turns than lately, as a share of all."""
STEPS_UNGRADED, STEPS_LOST, STEPS_ALIKE, STEPS_IDLE = 3, 3, 10, 20


def nothing_graded(told: Told) -> Finding | None:
    """One step without a grade may be a server that was away; a run of them is a run that failed."""
    rows = [*told.lately[1 - STEPS_UNGRADED :], told.metrics]
    if len(rows) < STEPS_UNGRADED or any(REWARD in row for row in rows):
        return None
    return found(
        f"for {STEPS_UNGRADED} steps not one episode has a grade, so there is nothing to learn from",
        steps=STEPS_UNGRADED,
        first=told.first_grading_error,
    )


def nothing_learned(told: Told) -> Finding | None:
    """One such step may be an odd batch; a run of them is a run that failed."""
    updates = [row for row in [*told.lately, told.metrics] if LR in row][-STEPS_LOST:]
    # Memory leaves out what was not a number.
    lost = [row for row in updates if not all(isfinite(row.get(key, nan)) for key in LOSS)]
    if len(lost) < STEPS_LOST or LR not in told.metrics:
        return None
    return found(
        f"in {STEPS_LOST} steps one after another the loss or its gradient is not a number, and such "
        "an update teaches nothing; lower the learning rate, or see the loss and the model",
        steps=STEPS_LOST,
        **{key.rpartition("/")[2]: str(told.metrics.get(key, nan)) for key in LOSS},
    )


def finite_numbers(told: Told) -> Finding | None:
    odd = {key: str(told.metrics[key]) for key in LOSS if not isfinite(told.metrics.get(key, 0.0))}
    return (
        found("the loss or its gradient is not a number; nothing was learned", **odd)
        if odd
        else None
    )


def entropy_collapse(told: Told) -> Finding | None:
    before = _values(told.began, ENTROPY)
    if not before or ENTROPY not in told.metrics:
        return None
    began, now = max(before), told.metrics[ENTROPY]
    if now >= COLLAPSED * began:
        return None
    return found(
        f"the entropy is below {COLLAPSED:.0%} of what it was; attempts become the same",
        entropy=now,
        began=began,
    )


def parse_failures(told: Told) -> Finding | None:
    now = told.metrics.get(MALFORMED, 0.0)
    before = fmean(_values(told.lately[-5:], MALFORMED) or [UNTRAINED])
    if now <= before + JUMP:
        return None
    return found(
        "many more turns than before hold a tool call that cannot be read; see the parser, the "
        "stop strings and the length of turns",
        malformed=now,
        before=before,
    )


def equal_rewards(told: Told) -> Finding | None:
    rows = [*told.lately[1 - STEPS_ALIKE :], told.metrics]
    ratios = [[v for k, v in row.items() if k.endswith("/signal_ratio")] for row in rows]
    if len(rows) < STEPS_ALIKE or not all(ratios) or any(map(any, ratios)):
        return None
    return found(
        f"for {STEPS_ALIKE} steps every group earned the same throughout: there is nothing to learn "
        "from; see the verifiers, or choose tasks that are neither too hard nor too easy",
        steps=STEPS_ALIKE,
        reward=told.metrics.get(REWARD, 0.0),
    )


def idle_filter(told: Told) -> Finding | None:
    rows = [*told.lately[1 - STEPS_IDLE :], told.metrics]
    seen = {key: _values(rows, key) for key in told.expected.acting}
    idle = [key for key, values in seen.items() if len(values) >= STEPS_IDLE and not any(values)]
    if not idle:
        return None
    return found(
        f"a filter is on and did nothing for {STEPS_IDLE} steps; switch it off or see why",
        metric=" ".join(idle),
        steps=STEPS_IDLE,
    )


def _values(rows: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]
