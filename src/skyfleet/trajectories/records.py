"""Convert a trajectory to plain JSON values and back without loss.

A new optional key keeps `VERSION`; any other change to the layout needs a new one, because records
of another version are rejected. The keys `opening` and `chosen` are persisted: do not rename them.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import compress, groupby, islice
from typing import Any

from skyfleet.chat.message import Image, Message, Part, Text, ToolCall
from skyfleet.chat.transcript import Transcript
from skyfleet.errors import SkyfleetError
from skyfleet.redaction import redact_known
from skyfleet.tasks.task import Grade
from skyfleet.trajectories.trajectory import Ending, Failure, Trajectory, Turn

VERSION = 2

Record = dict[str, Any]


class RecordError(SkyfleetError, ValueError):
    """A record on disk cannot be read."""


def to_record(trajectory: Trajectory) -> Record:
    """Return dicts, lists, strings, numbers, booleans and None only, ready for `json.dumps`."""
    grade, failure = trajectory.grade, trajectory.failure
    return {
        "version": VERSION,
        "task_key": trajectory.task_key,
        "env_key": trajectory.env_key,
        "sample": trajectory.sample,
        "opening": [message_to_record(message) for message in trajectory.prompt],
        "turns": [_turn_record(turn) for turn in trajectory.turns],
        "transcripts": [_transcript_record(transcript) for transcript in trajectory.transcripts],
        "ending": trajectory.ending.value,
        "grade": grade and _grade_record(grade),
        "failure": failure and {"kind": failure.kind, "detail": failure.detail},
        "seconds": trajectory.seconds,
    }


def encode_episode(trajectory: Trajectory) -> bytes:
    """The record as one line of JSON, without the newline."""
    # ASCII, because a model may write a lone surrogate into its arguments.
    return json.dumps(to_record(trajectory), separators=(",", ":")).encode("ascii")


def from_record(record: Mapping[str, Any]) -> Trajectory:
    """Rebuild the trajectory that `to_record` converted."""
    if not isinstance(record, Mapping):
        raise RecordError(f"{record!r:.40} is not a record; pass one that `to_record` wrote")
    if (version := record.get("version")) != VERSION:
        raise RecordError(
            f"version={version!r}; this skyfleet reads version {VERSION}: use the one that wrote it"
        )
    try:
        return _trajectory(record)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"{type(error).__name__}: {error}; pass a record that `to_record` wrote"
        ) from None


def _trajectory(record: Mapping[str, Any]) -> Trajectory:
    grade, failure = record["grade"], record["failure"]
    return Trajectory(
        task_key=record["task_key"],
        env_key=record["env_key"],
        sample=record["sample"],
        prompt=tuple(message_from_record(message) for message in record["opening"]),
        turns=tuple(_turn(turn) for turn in record["turns"]),
        transcripts=tuple(_transcript(transcript) for transcript in record["transcripts"]),
        ending=Ending(record["ending"]),
        grade=grade and Grade(**grade),
        failure=failure and Failure(**failure),
        seconds=record["seconds"],
    )


def _grade_record(grade: Grade) -> Record:
    return {
        "reward": grade.reward,
        "success": grade.success,
        "parts": dict(grade.parts),
        "explanation": redact_known(grade.explanation),
    }


def _turn_record(turn: Turn) -> Record:
    return {
        "action": message_to_record(turn.action),
        "replies": [message_to_record(reply) for reply in turn.replies],
        "reward": turn.reward,
        "engine_seconds": turn.engine_seconds,
        "env_seconds": turn.env_seconds,
        **({"info": dict(turn.info)} if turn.info else {}),
        **({"finish_reason": turn.finish_reason} if turn.finish_reason else {}),
    }


def _turn(record: Mapping[str, Any]) -> Turn:
    return Turn(
        action=message_from_record(record["action"]),
        replies=tuple(message_from_record(reply) for reply in record["replies"]),
        reward=record["reward"],
        engine_seconds=record["engine_seconds"],
        env_seconds=record["env_seconds"],
        info=dict(record.get("info", {})),
        finish_reason=record.get("finish_reason"),
    )


def _transcript_record(transcript: Transcript) -> Record:
    mask = transcript.loss_mask[:]
    return {
        "token_ids": transcript.token_ids[:],
        "chosen": _find_runs(mask),
        "logprobs": _pack(list(compress(transcript.logprobs[:], mask))),
        "policy_versions": list(transcript.policy_versions),
        **_changes_record(transcript),
        **({"reason": transcript.reason} if transcript.reason else {}),
    }


def _changes_record(transcript: Transcript) -> Record:
    """Of a transcript that was sampled while weights arrived; without the key otherwise."""
    changes = [[at, version] for at, version in transcript.version_changes]
    return {"version_changes": changes} if changes else {}


def _transcript(record: Mapping[str, Any]) -> Transcript:
    token_ids = list(record["token_ids"])
    loss_mask, logprobs = [False] * len(token_ids), [0.0] * len(token_ids)
    sampled_logprobs = _unpack(record["logprobs"])
    remaining = iter(sampled_logprobs)
    for start, stop in record["chosen"]:
        loss_mask[start:stop] = [True] * (stop - start)
        logprobs[start:stop] = islice(remaining, stop - start)
    same_length = len(token_ids) == len(loss_mask) == len(logprobs)
    if not same_length or sum(loss_mask) != len(sampled_logprobs):
        raise ValueError(
            f"{len(token_ids)} tokens, chosen={record['chosen']!r:.60} and {len(sampled_logprobs)} "
            "logprobs do not fit"
        )
    return Transcript(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        policy_versions=list(record["policy_versions"]),
        version_changes=[(at, version) for at, version in record.get("version_changes", ())],
        reason=record.get("reason", ""),
    )


def _find_runs(mask: Sequence[bool]) -> list[list[int]]:
    """Return the ranges where the mask is true: `_find_runs([0, 1, 1])` is [[1, 3]]."""
    runs, at = [], 0
    for is_sampled, run in groupby(mask):
        start, at = at, at + sum(1 for _ in run)
        if is_sampled:
            runs.append([start, at])
    return runs


def _pack(values: list[float]) -> list[float] | str:
    """Pack float32 values, which engines return, as base64; keep others as a list."""
    narrow = array("f", values)
    return base64.b64encode(narrow.tobytes()).decode("ascii") if list(narrow) == values else values


def _unpack(values: list[float] | str) -> list[float]:
    return array("f", base64.b64decode(values)).tolist() if isinstance(values, str) else values


def message_to_record(message: Message) -> Record:
    """Return the message as plain JSON values."""
    content = message.content
    return {
        "role": message.role,
        "content": content if isinstance(content, str) else [_part_record(p) for p in content],
        "reasoning": message.reasoning,
        "tool_calls": [
            {"id": call.id, "name": call.name, "arguments": dict(call.arguments)}
            | ({"repair": call.repair} if call.repair else {})
            for call in message.tool_calls
        ],
        "malformed_calls": list(message.malformed_calls),
        "repaired_calls": message.repaired_calls,
        "tool_call_id": message.tool_call_id,
        "is_error": message.is_error,
    }


def message_from_record(record: Mapping[str, Any]) -> Message:
    """Rebuild the message that `message_to_record` converted."""
    content = record["content"]
    return Message(
        role=record["role"],
        content=content if isinstance(content, str) else tuple(_part(part) for part in content),
        reasoning=record["reasoning"],
        tool_calls=tuple(ToolCall(**call) for call in record["tool_calls"]),
        malformed_calls=tuple(record["malformed_calls"]),
        repaired_calls=record["repaired_calls"],
        tool_call_id=record["tool_call_id"],
        is_error=record["is_error"],
    )


def _part_record(part: Part) -> Record:
    if isinstance(part, Text):
        return {"text": part.text}
    return {"image": base64.b64encode(part.data).decode("ascii"), "media_type": part.media_type}


def _part(record: Mapping[str, Any]) -> Part:
    if "text" in record:
        return Text(record["text"])
    return Image(base64.b64decode(record["image"]), record["media_type"])
