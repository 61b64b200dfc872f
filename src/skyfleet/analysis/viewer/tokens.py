"""Tokens: what the policy was given and what it chose, with words where the run kept its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skyfleet.analysis.viewer.episode import finite
from skyfleet.trajectories.trajectory import Trajectory

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
