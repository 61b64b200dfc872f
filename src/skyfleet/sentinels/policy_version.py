"""Who speaks is the newest policy, and versions only go up."""

from __future__ import annotations

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Played, Synced


def policy_version(played: Played) -> Finding | None:
    """Every completion is of the learner's own version."""
    for speech in played.speeches:
        for said in speech.heard:
            if said.completion.policy_version != played.policy_version:
                return found(
                    "an episode was spoken by another version than the learner's",
                    task=speech.trajectory.task_key,
                    spoken_by=said.completion.policy_version,
                    learner=played.policy_version,
                )
    return None


def served_version(synced: Synced) -> Finding | None:
    """After a sync learner, sync and every engine name one version, newer than the last."""
    learner = synced.learner.policy_version
    served = {engine.policy_version for engine in synced.engines}
    if served == {learner} == {synced.version} and learner > synced.previous:
        return None
    return found(
        "after the sync the versions are not one and newer than before",
        before=synced.previous,
        learner=learner,
        sync=synced.version,
        engines=" ".join(map(str, sorted(served))),
    )
