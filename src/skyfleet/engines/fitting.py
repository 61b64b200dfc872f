"""Fitting: what no engine can continue is refused at the door, for its own session only."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.engines.sampling import SamplingParams
from skyfleet.errors import EngineError


def check_fits(
    token_ids: Sequence[int], sampling: SamplingParams, *, capacity: int, session: str
) -> None:
    """EngineError unless there is a prompt, and room for it with the turn that may follow."""
    if not token_ids:
        raise EngineError(f"session {session}: an empty prompt has nothing to continue")
    if len(token_ids) + sampling.max_generate_length > capacity:
        raise EngineError(
            f"session {session}: {len(token_ids)} prompt tokens + max_generate_length="
            f"{sampling.max_generate_length} exceed the engine's {capacity}"
        )
