"""Episode data for the page: conversation, grade, timings, images and tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from skyfleet.analysis.failure_class import Evidence
from skyfleet.analysis.failures import diagnose
from skyfleet.analysis.viewer.listing import get_outcome
from skyfleet.chat.message import Message, Text
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Trajectory, Turn

Json = dict[str, Any]
PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Image types that a browser displays and cannot execute."""
Decode = Callable[[int], str]


def row(entry: Entry, *, failure_class: str = "", passage: str = "") -> Json:
    """A row of the list of episodes."""
    return {
        "id": entry.id,
        "env": entry.env_key,
        "task": entry.task_key,
        "kind": entry.kind,
        "set": entry.set_name,
        "step": entry.step,
        "sample": entry.sample,
        "outcome": get_outcome(entry.success),
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


def episode(trajectory: Trajectory) -> Json:
    """The conversation, its grade and timings; tokens are a separate request."""
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
        "prompt": [_message(message, pictures) for message in trajectory.prompt],
        "turns": [_turn(turn, pictures) for turn in trajectory.turns],
        "transcripts": len(trajectory.transcripts),
    }


def picture(trajectory: Trajectory, number: int) -> tuple[str, bytes] | None:
    """The media type and bytes of the n-th image of an episode, counted from 0."""
    messages = [*trajectory.prompt]
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


def format_json(arguments: Mapping[str, Any]) -> str:
    """Formatted here because JavaScript integers are exact only up to 2**53."""
    return json.dumps(dict(arguments), indent=2, ensure_ascii=False)


def finite(value: float | None) -> float | None:
    """None for infinity and NaN, which JSON does not have."""
    return value if value is None or isfinite(value) else None


class _Pictures:
    """Numbers the images of an episode in the same order as `picture`."""

    def __init__(self) -> None:
        self.count = 0

    def show(self, media_type: str, n_bytes: int) -> Json:
        number, self.count = self.count, self.count + 1
        is_displayable = media_type in PICTURES
        return {
            "picture": number if is_displayable else None,
            "media_type": media_type,
            "bytes": n_bytes,
        }


def _evidence(evidence: Evidence) -> Json:
    return {
        "class": evidence.failure_class.value,
        "turn": evidence.turn,
        "excerpt": evidence.excerpt,
    }


def _turn(turn: Turn, pictures: _Pictures) -> Json:
    return {
        "action": _message(turn.action, pictures),
        "replies": [_message(reply, pictures) for reply in turn.replies],
        "reward": finite(turn.reward),
        "engine_seconds": turn.engine_seconds,
        "env_seconds": turn.env_seconds,
    }


def _message(message: Message, pictures: _Pictures) -> Json:
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
                "arguments": format_json(call.arguments),
                "repair": call.repair,
            }
            for call in message.tool_calls
        ],
        "malformed": list(message.malformed_calls),
        "reply_to": message.tool_call_id,
        "is_error": message.is_error,
    }


def tokens(trajectory: Trajectory, decode: Decode | None) -> list[dict[str, Any]]:
    """Each transcript as columns with one entry per token."""
    return [
        {
            "ids": list(transcript.token_ids),
            "chosen": [int(chosen) for chosen in transcript.loss_mask],
            "logprobs": [finite(round(logprob, 4)) for logprob in transcript.logprobs],
            "texts": _texts(transcript.token_ids, decode) if decode else None,
            "policy_versions": list(transcript.policy_versions),
            "reason": transcript.reason,
        }
        for transcript in trajectory.transcripts
    ]


def load_decoder(run: Path) -> Decode | None:
    """Decode with the tokenizer of the newest checkpoint; None without one or `tokenizers`."""
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
    texts = {token_id: decode(token_id) for token_id in set(token_ids)}
    return [texts[token_id] for token_id in token_ids]
