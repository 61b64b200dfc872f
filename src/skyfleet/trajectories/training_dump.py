"""Training dump: a step's episodes as SkyRL-Fleet's JSON lines, for whoever has tools for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skyfleet.storage.local import write_atomically
from skyfleet.trajectories.skyrl_dump import STOP_REASONS
from skyfleet.trajectories.trajectory import Group, Trajectory


def write_training_dump(
    path: Path, step: int, groups: Sequence[Group], *, text: Callable[[Sequence[int]], str]
) -> None:
    """`text` is the renderer's, special tokens included. An unknown reward is null."""
    now = datetime.now(UTC).isoformat()
    rows = (
        {"step": step, "timestamp": now, **_row(trajectory, text)}
        for group in groups
        for trajectory in group.trajectories
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def _row(trajectory: Trajectory, text: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    # History that was rewritten is told once more in the transcript that came last.
    last = trajectory.transcripts[-1:]
    token_ids = [token for transcript in last for token in transcript.token_ids]
    mask = [chosen for transcript in last for chosen in transcript.loss_mask]
    begins = mask.index(True) if True in mask else len(mask)
    return {
        "env_key": trajectory.env_key,
        "data_source": trajectory.env_key,
        "task_key": trajectory.task_key,
        "stop_reason": STOP_REASONS[trajectory.ending],
        "reward": trajectory.reward,
        "turns": len(trajectory.turns),
        "tokens": len(token_ids) - begins,
        "prompt": text(token_ids[:begins]),
        "text": text(token_ids[begins:]),
        "image_paths": [],
    }
