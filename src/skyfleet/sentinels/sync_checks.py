"""Checks after a weight sync: served policy versions and engine weights."""

from __future__ import annotations

from skyfleet.models.lora import find_unmerged
from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.fingerprint import find_decoder, find_differences, find_whole_weights
from skyfleet.sentinels.stages import SyncStage


def served_version(stage: SyncStage) -> Finding | None:
    """Learner, weight sync and every engine have the same version, newer than the last."""
    learner = stage.learner.policy_version
    served = {engine.policy_version for engine in stage.engines}
    if served == {learner} == {stage.version} and learner > stage.previous:
        return None
    return found(
        "policy versions disagree after the weight sync: expected a single version newer than the "
        "last",
        before=stage.previous,
        learner=learner,
        sync=stage.version,
        engines=" ".join(map(str, sorted(served))),
    )


def engine_weights(stage: SyncStage) -> Finding | None:
    """Every engine holds the learner's weights, bit by bit, with adapters merged."""
    decoder = find_decoder(stage.learner)
    if decoder is not None and (names := find_unmerged(decoder.module)):
        return found(
            "the learner's adapters are not merged into the weights that engines use",
            layers=len(names),
            first=names[0],
        )
    for number, engine in enumerate(stage.engines):
        if find_decoder(engine) is decoder:
            continue  # the same object, or both in another process
        theirs = find_whole_weights(engine)
        if decoder is None or theirs is None:
            continue  # in another process, where the weight sync verifies the weights
        ours = dict(stage.learner.named_weights())
        if names := find_differences(ours, theirs):
            return found(
                "an engine has other weights than the learner after the weight sync",
                engine=number,
                tensors=len(names),
                of=len(ours),
                first=names[0],
            )
    return None
