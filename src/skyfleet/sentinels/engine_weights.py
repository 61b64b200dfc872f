"""After a sync every engine holds the learner's weights, bit by bit, adapters merged."""

from __future__ import annotations

from skyfleet.models.lora import unmerged
from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.fingerprint import differing, weights_of
from skyfleet.sentinels.stages import Synced


def engine_weights(synced: Synced) -> Finding | None:
    decoder = getattr(synced.learner, "_decoder", None)
    if decoder is not None and (names := unmerged(decoder.module)):
        return found(
            "the learner's adapters are not merged into the weights that engines run",
            layers=len(names),
            first=names[0],
        )
    for number, engine in enumerate(synced.engines):
        if getattr(engine, "_decoder", None) is decoder:
            continue  # the very same, or both elsewhere
        ours, theirs = weights_of(synced.learner), weights_of(engine)
        if ours is None or theirs is None:
            continue  # in another process: its own sync has to tell
        if names := differing(ours, theirs):
            return found(
                "after the sync an engine has other weights than the learner",
                engine=number,
                tensors=len(names),
                of=len(ours),
                first=names[0],
            )
    return None
