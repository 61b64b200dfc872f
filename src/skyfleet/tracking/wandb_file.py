"""Read a W&B run: an offline `.wandb` file, or `wandb://entity/project/run` through W&B's API.

A `.wandb` file is a header of 7 bytes and LevelDB's log framing: blocks of 32 KiB, and in them
fragments of a checksum, a length and a type. A record is a protobuf message of W&B.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from skyfleet.errors import ConfigError, MissingExtraError

logger = logging.getLogger(__name__)

SCHEME = "wandb://"
FILE_ENDING = ".wandb"
HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
BLOCK_BYTES = 32 * 1024
_FRAGMENT = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_STEP = "_step"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker stored of a run."""

    name: str
    config: Mapping[str, Any]
    rows: tuple[Mapping[str, float], ...]
    """Finite numbers only, by metric; `_step` is the step. In order of the steps."""
    is_finished: bool
    """Whether the run ended by itself, as far as the tracker knows."""


def is_tracked_run(address: str) -> bool:
    """Whether it is an address of W&B, a `.wandb` file, or W&B's own folder of a run."""
    return address.startswith(SCHEME) or _find_file(Path(address)) is not None


def read_tracked_run(address: str) -> TrackedRun:
    if address.startswith(SCHEME):
        return _download(address)
    return read_wandb_file(_find_file(Path(address)) or Path(address))


def _find_file(path: Path) -> Path | None:
    """The file itself, or the one in a folder `offline-run-*`."""
    if path.suffix == FILE_ENDING:
        return path
    return next(iter(sorted(path.glob(f"run-*{FILE_ENDING}"))), None)


def read_wandb_file(path: Path) -> TrackedRun:
    """The run in a file, also while it is being written or after a kill; needs the package wandb."""
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError:
        raise MissingExtraError("wandb", "wandb") from None
    messages: Any = wandb_internal_pb2  # its classes are made when it is imported
    name, is_finished = path.stem, False
    config: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for data in read_records(path):
        record = messages.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            name = record.run.display_name or record.run.run_id or name
            config.update(_parse_items(record.run.config.update))
        elif kind == "config":
            config.update(_parse_items(record.config.update))
        elif kind == "history":
            row = _parse_items(record.history.item)
            if record.history.HasField("step"):
                row.setdefault(_STEP, record.history.step.num)
            rows.append(row)
        elif kind == "exit":
            is_finished = record.exit.exit_code == 0
    return TrackedRun(name=name, config=config, rows=_select_numbers(rows), is_finished=is_finished)


def read_records(path: Path) -> Iterator[bytes]:
    """The records of a file; an incomplete end is ignored, a damaged part is skipped and logged."""
    with path.open("rb") as file:
        if file.read(len(HEADER)) != HEADER:
            raise ConfigError(
                f"{path} is not a .wandb file; pass wandb/offline-run-*/run-*.wandb of a run folder"
            )
        file.seek(0)
        parts: list[bytes] = []
        number, is_damaged = 0, False
        while block := file.read(BLOCK_BYTES):
            offset = len(HEADER) if number == 0 else 0
            number += 1
            while offset + _FRAGMENT.size <= len(block):
                checksum, length, kind = _FRAGMENT.unpack_from(block, offset)
                data = block[offset + _FRAGMENT.size : offset + _FRAGMENT.size + length]
                if kind == 0 and length == 0:
                    break  # the rest of the block is padding
                offset += _FRAGMENT.size + length
                if offset > len(block) and len(block) < BLOCK_BYTES:
                    return  # still being written, or the process was killed
                if offset > len(block) or crc32(data, crc32(bytes([kind]))) != checksum:
                    parts.clear()
                    if not is_damaged:
                        is_damaged = True
                        logger.warning(
                            "%s: block %d is damaged; what it held is left out", path, number
                        )
                    break
                if kind in (_FULL, _FIRST):
                    parts.clear()
                elif not parts:
                    continue  # the beginning of the record was damaged
                parts.append(data)
                if kind in (_FULL, _LAST):
                    yield b"".join(parts)
                    parts.clear()


def _parse_items(items: Any) -> dict[str, Any]:
    """Items have a key or a nested key, and a value in JSON."""
    return {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for item in items
        if item.value_json
    }


def _select_numbers(rows: list[dict[str, Any]]) -> tuple[dict[str, float], ...]:
    selected = [
        {
            key: float(value)
            for key, value in row.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0
        }
        for row in rows
    ]
    return tuple(sorted(selected, key=lambda row: row.get(_STEP, 0.0)))


def _download(address: str) -> TrackedRun:
    """A run, or all runs of a group: a run that was resumed is one W&B run per process."""
    try:
        import wandb
    except ImportError:
        raise MissingExtraError("wandb", "wandb") from None
    parts = address.removeprefix(SCHEME).strip("/").split("/")
    is_group = len(parts) == 4 and parts[2] == "group"
    if not all(parts) or not (is_group or len(parts) == 3):
        raise ConfigError(
            f"{address} is not the address of a run; write wandb://entity/project/run, or "
            "wandb://entity/project/group/name for a run that was resumed"
        )
    try:
        api, project = wandb.Api(), "/".join(parts[:2])
        if is_group:
            runs = list(api.runs(project, filters={"group": parts[3]}, order="+created_at"))
        else:
            runs = [api.run(f"{project}/{parts[2]}")]
        histories = [_select_numbers([dict(row) for row in run.scan_history()]) for run in runs]
        config = dict(runs[-1].config) if runs else {}
    except (wandb.Error, ValueError) as error:
        raise ConfigError(
            f"{address}: {error}; check the address, WANDB_API_KEY and WANDB_BASE_URL"
        ) from error
    if not runs:
        raise ConfigError(f"{address}: the project has no run of this group; check the name")
    return TrackedRun(
        name=parts[3] if is_group else str(runs[0].name),
        config=config,
        rows=_join_histories(histories),
        is_finished=runs[-1].state == "finished",
    )


def _join_histories(
    histories: Sequence[Sequence[Mapping[str, float]]],
) -> tuple[Mapping[str, float], ...]:
    """In the order of their start; each replaces the rows of earlier ones from its first step on."""
    joined: list[Mapping[str, float]] = []
    for rows in histories:
        if rows:
            first = rows[0].get(_STEP, 0.0)
            joined = [row for row in joined if row.get(_STEP, 0.0) < first]
        joined.extend(rows)
    return tuple(joined)
