"""Checks of the metrics over several steps; most are warnings, because they can have harmless causes."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from statistics import fmean

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import MetricsStage

ENTROPY, MALFORMED = "policy/policy_entropy", "reward/parse_failure_rate"
LOSS, LR = ("policy/final_loss", "policy/grad_norm"), "policy/policy_lr"
REWARD = "generation/avg_reward"
"""NaN in a step without a grade."""
COLLAPSED = 0.1
"""Share of the initial entropy, the highest of the first steps."""
UNTRAINED = 0.6
"""Share of malformed turns that an untrained policy may have."""
JUMP = 0.3
"""Increase of the share of malformed turns."""
STEPS_UNGRADED, STEPS_LOST, STEPS_ALIKE, STEPS_IDLE = 3, 3, 10, 20
N_FIRST_ROWS, N_LAST_ROWS = 3, 50

Row = Mapping[str, float]


class MetricsHistory:
    """The first and last rows of metrics.jsonl, so that a resumed run has the same history."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._first: list[Row] = []
        self._last: deque[Row] = deque(maxlen=N_LAST_ROWS)

    def read(self) -> tuple[Sequence[Row], Sequence[Row]]:
        """The first and last rows of training steps that are written so far."""
        for line in self._read_new_lines():
            values = json.loads(line)
            if values["step"] == 0:
                continue
            row = {key: value for key, value in values.items() if value is not None}
            if len(self._first) < N_FIRST_ROWS:
                self._first.append(row)
            self._last.append(row)
        return self._first, list(self._last)

    def _read_new_lines(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            lines = file.readlines()
            self._read_bytes = file.tell()
        return lines


def nothing_graded(stage: MetricsStage) -> Finding | None:
    """A single step without a grade may be an outage; several in a row are a failed run."""
    rows = [*stage.last_rows[1 - STEPS_UNGRADED :], stage.metrics]
    if len(rows) < STEPS_UNGRADED or any(isfinite(row.get(REWARD, nan)) for row in rows):
        return None
    return found(
        f"for {STEPS_UNGRADED} steps no episode has a grade, so there is nothing to learn from",
        steps=STEPS_UNGRADED,
        first=stage.first_grading_error,
    )


def nothing_learned(stage: MetricsStage) -> Finding | None:
    """A single skipped update may be an odd batch; several in a row are a failed run."""
    updates = [row for row in [*stage.last_rows, stage.metrics] if LR in row][-STEPS_LOST:]
    # The history leaves out values that are not finite.
    skipped = [row for row in updates if not all(isfinite(row.get(key, nan)) for key in LOSS)]
    if len(skipped) < STEPS_LOST or LR not in stage.metrics:
        return None
    return found(
        f"for {STEPS_LOST} steps in a row the loss or its gradient is not finite, and such updates "
        "are skipped; lower the learning rate, or check the loss and the model",
        steps=STEPS_LOST,
        **{key.rpartition("/")[2]: str(stage.metrics.get(key, nan)) for key in LOSS},
    )


def finite_numbers(stage: MetricsStage) -> Finding | None:
    """Loss and gradient norm are finite."""
    values = {key: stage.metrics.get(key, 0.0) for key in LOSS}
    wrong = {key: str(value) for key, value in values.items() if not isfinite(value)}
    if not wrong:
        return None
    return found("the loss or its gradient is not finite, so the update was skipped", **wrong)


def entropy_collapse(stage: MetricsStage) -> Finding | None:
    """The entropy stays above a tenth of its initial value."""
    before = _values(stage.first_rows, ENTROPY)
    if not before or ENTROPY not in stage.metrics:
        return None
    initial, now = max(before), stage.metrics[ENTROPY]
    if now >= COLLAPSED * initial:
        return None
    return found(
        f"the entropy is below {COLLAPSED:.0%} of its initial value; attempts become identical",
        entropy=now,
        began=initial,
    )


def parse_failures(stage: MetricsStage) -> Finding | None:
    """The share of malformed turns does not jump."""
    now = stage.metrics.get(MALFORMED, 0.0)
    before = fmean(_values(stage.last_rows[-5:], MALFORMED) or [UNTRAINED])
    if not now > before + JUMP:  # NaN in a step without a turn
        return None
    return found(
        "many more turns than before hold a malformed tool call; check the parser, the stop "
        "strings and max_generate_length",
        malformed=now,
        before=before,
    )


def equal_rewards(stage: MetricsStage) -> Finding | None:
    """Some groups of the last steps have attempts with different rewards."""
    rows = [*stage.last_rows[1 - STEPS_ALIKE :], stage.metrics]
    ratios = [[v for k, v in row.items() if k.endswith("/signal_ratio")] for row in rows]
    if len(rows) < STEPS_ALIKE or not all(ratios) or any(map(any, ratios)):
        return None
    return found(
        f"for {STEPS_ALIKE} steps the attempts of every group earned equal rewards, so there is "
        "nothing to learn from; check the verifiers, or choose tasks that are neither too hard nor "
        "too easy",
        steps=STEPS_ALIKE,
        reward=stage.metrics.get(REWARD, 0.0),
    )


def idle_filter(stage: MetricsStage) -> Finding | None:
    """A filter that is on acts at least once in some steps."""
    rows = [*stage.last_rows[1 - STEPS_IDLE :], stage.metrics]
    seen = {key: _values(rows, key) for key in stage.expected.filter_metrics}
    idle = [key for key, values in seen.items() if len(values) >= STEPS_IDLE and not any(values)]
    if not idle:
        return None
    return found(
        f"a filter is on and did nothing for {STEPS_IDLE} steps; switch it off or find out why",
        metric=" ".join(idle),
        steps=STEPS_IDLE,
    )


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]
