"""The episode page: one trajectory as what the browser shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from skyfleet.analysis.failure_class import Evidence
from skyfleet.analysis.failures import diagnose
from skyfleet.analysis.viewer.listing import outcome_of
from skyfleet.chat.message import Message, Text
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Trajectory, Turn

Shown = dict[str, Any]

PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""What a browser shows and cannot run."""


def row(entry: Entry, *, failure_class: str = "", passage: str = "") -> Shown:
    """What the list says of an episode."""
    return {
        "id": entry.id,
        "env": entry.env_key,
        "task": entry.task_key,
        "kind": entry.kind,
        "set": entry.set_name,
        "step": entry.step,
        "sample": entry.sample,
        "outcome": outcome_of(entry.success),
        "reward": finite(entry.reward),
        "ending": entry.ending.value,
        "n_turns": entry.turns,
        "calls": entry.tool_calls,
        "errors": entry.tool_errors + entry.malformed_calls,
        "tokens": entry.sampled_tokens,
        "seconds": entry.seconds,
        "failure": entry.failure,
        "class": failure_class,
        "passage": passage,
    }


def episode(trajectory: Trajectory) -> Shown:
    """The conversation, its grade and its timings; tokens are asked for apart."""
    grade, failure, why = trajectory.grade, trajectory.failure, diagnose(trajectory)
    pictures = _Pictures()
    return {
        "grade": grade
        and {
            "reward": finite(grade.reward),
            "parts": {name: finite(value) for name, value in grade.parts.items()},
            "explanation": grade.explanation,
        },
        "failure_detail": failure.detail if failure else "",
        "why": [_evidence(e) for e in (why.primary, *why.others)] if why else [],
        "opening": [_message(message, pictures) for message in trajectory.opening],
        "turns": [_turn(turn, pictures) for turn in trajectory.turns],
        "transcripts": len(trajectory.transcripts),
    }


def picture(trajectory: Trajectory, number: int) -> tuple[str, bytes] | None:
    """The media type and bytes of the n-th picture of an episode, from 0."""
    messages = [*trajectory.opening]
    for turn in trajectory.turns:
        messages += [turn.action, *turn.replies]
    images = [
        part
        for message in messages
        if not isinstance(message.content, str)
        for part in message.content
        if not isinstance(part, Text)
    ]
    if number >= len(images) or images[number].media_type not in PICTURES:
        return None
    return images[number].media_type, images[number].data


def pretty(arguments: Mapping[str, Any]) -> str:
    """Written here and not in the browser, whose numbers end at 2**53."""
    return json.dumps(dict(arguments), indent=2, ensure_ascii=False)


def finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is None or isfinite(value) else None


class _Pictures:
    """Numbers the pictures of an episode in the order `picture` counts them."""

    def __init__(self) -> None:
        self.count = 0

    def show(self, media_type: str, n_bytes: int) -> Shown:
        number, self.count = self.count, self.count + 1
        shown = media_type in PICTURES
        return {"picture": number if shown else None, "media_type": media_type, "bytes": n_bytes}


def _evidence(evidence: Evidence) -> Shown:
    return {
        "class": evidence.failure_class.value,
        "turn": evidence.turn,
        "excerpt": evidence.excerpt,
    }


def _turn(turn: Turn, pictures: _Pictures) -> Shown:
    return {
        "action": _message(turn.action, pictures),
        "replies": [_message(reply, pictures) for reply in turn.replies],
        "reward": finite(turn.reward),
        "engine_seconds": turn.engine_seconds,
        "env_seconds": turn.env_seconds,
    }


def _message(message: Message, pictures: _Pictures) -> Shown:
    content = (Text(message.content),) if isinstance(message.content, str) else message.content
    return {
        "role": message.role,
        "parts": [
            {"text": part.text}
            if isinstance(part, Text)
            else pictures.show(part.media_type, len(part.data))
            for part in content
        ],
        "reasoning": message.reasoning or "",
        "calls": [
            {
                "id": call.id,
                "name": call.name,
                "brief": json.dumps(dict(call.arguments), ensure_ascii=False)[1:-1][:200],
                "arguments": pretty(call.arguments),
            }
            for call in message.tool_calls
        ],
        "malformed": list(message.malformed_calls),
        "reply_to": message.tool_call_id,
        "is_error": message.is_error,
    }


Decode = Callable[[int], str]


def tokens(trajectory: Trajectory, decode: Decode | None) -> list[dict[str, Any]]:
    """Each transcript as columns, one entry a token."""
    return [
        {
            "ids": transcript.token_ids,
            "chosen": [int(chosen) for chosen in transcript.loss_mask],
            "logprobs": [finite(round(logprob, 4)) for logprob in transcript.logprobs],
            "texts": _texts(transcript.token_ids, decode) if decode else None,
            "policy_versions": transcript.policy_versions,
            "reason": transcript.reason,
        }
        for transcript in trajectory.transcripts
    ]


def decoder_of(run: Path) -> Decode | None:
    """The tokenizer of the run's newest checkpoint; None without one, or without `tokenizers`."""
    files = run.glob("checkpoints/global_step_*/policy/tokenizer.json")
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(newest))
    return lambda token_id: str(tokenizer.decode([token_id], skip_special_tokens=False))


def _texts(token_ids: Sequence[int], decode: Decode) -> list[str]:
    words = {token_id: decode(token_id) for token_id in set(token_ids)}
    return [words[token_id] for token_id in token_ids]
