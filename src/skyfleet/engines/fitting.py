"""Fitting: what no engine can continue is refused at the door, for its own session only."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.engines.posting import RefusedError
from skyfleet.engines.sampling import SamplingParams


def check_fits(
    token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    capacity: int,
    session: str,
    vocab_size: int | None = None,
) -> None:
    """RefusedError unless there is a prompt, of the vocabulary, and room for it with its turn.

    Without `vocab_size` the ids are not looked at: vLLM does that itself.
    """
    if not token_ids:
        raise RefusedError(f"session {session}: an empty prompt has nothing to continue")
    if len(token_ids) + sampling.max_generate_length > capacity:
        raise RefusedError(
            f"session {session}: {len(token_ids)} prompt tokens + max_generate_length="
            f"{sampling.max_generate_length} exceed the engine's {capacity}"
        )
    if vocab_size is None:
        return
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < vocab_size:
            raise RefusedError(
                f"session {session}: the prompt holds token {extreme}, and the model's are 0 to "
                f"{vocab_size - 1}; was it written with another tokenizer?"
            )
