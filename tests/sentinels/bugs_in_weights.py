"""Bugs in updates of the weights and in weight sync."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.sentinels.planted import Bug

from skyfleet.engines import embedded
from skyfleet.learner.optimizer import Optimizer
from skyfleet.models.decoder import Decoder
from skyfleet.trainer.run import Run
from skyfleet.weight_sync.sync import InProcessSync

Patch = pytest.MonkeyPatch


def the_engine_has_weights_of_its_own(run: Run, patch: Patch) -> None:
    patch.setattr(run.inference.engines[0], "_decoder", _copy(run))


def the_engine_is_coarser(run: Run, patch: Patch) -> None:
    """Its weights are rounded to bfloat16."""
    decoder = _copy(run)
    with torch.no_grad():
        for weight in decoder.module.parameters():
            weight.copy_(weight.bfloat16())
    patch.setattr(run.inference.engines[0], "_decoder", decoder)


def the_engine_gets_half_of_the_weights(run: Run, patch: Patch) -> None:
    decoder = _copy(run)
    patch.setattr(run.inference.engines[0], "_decoder", decoder)
    push = InProcessSync.push

    async def half(self: InProcessSync, learner: Any, engines: Any) -> int:
        pairs = list(zip(decoder.module.parameters(), _policy(run).parameters(), strict=True))
        with torch.no_grad():
            for theirs, ours in pairs[: len(pairs) // 2]:
                theirs.copy_(ours)
        return await push(self, learner, engines)

    patch.setattr(InProcessSync, "push", half)


def _copy(run: Run) -> Decoder:
    return Decoder(copy.deepcopy(_policy(run)), max_positions=1012)


def _policy(run: Run) -> Any:
    learner: Any = run.learner
    return learner.decoder.module


def the_cache_outlives_its_weights(run: Run, patch: Patch) -> None:
    patch.setattr(embedded.EmbeddedEngine, "_drop_cache", lambda self: None)
    patch.setattr(embedded.EmbeddedEngine, "release", _keeps)


async def _keeps(self: Any, session: str) -> None: ...


def engines_keep_their_version(run: Run, patch: Patch) -> None:
    async def push(self: InProcessSync, learner: Any, engines: Any) -> int:
        version: int = learner.policy_version
        return version

    patch.setattr(InProcessSync, "push", push)


def the_engine_is_a_version_behind(run: Run, patch: Patch) -> None:
    run.inference.engines[0].policy_version -= 1


def the_engine_stays_where_it_was(run: Run, patch: Patch) -> None:
    the_engine_has_weights_of_its_own(run, patch)
    engines_keep_their_version(run, patch)


def nothing_is_applied(run: Run, patch: Patch) -> None:
    patch.setattr(Optimizer, "_step", lambda self: None)


def the_rate_is_far_too_high(run: Run, patch: Patch) -> None:
    own = Optimizer._step

    def leap(self: Any) -> None:
        for group in self._adam.param_groups:
            group["lr"] = 3.0
        own(self)

    patch.setattr(Optimizer, "_step", leap)


IN_WEIGHTS = (
    Bug(
        name="the engine computes with lower precision",
        source="other",
        sentinel="logprob_gap",
        plant=the_engine_is_coarser,
        expected_text="cause: dtype",
    ),
    Bug(
        name="the engine's cache outlives the weights it was computed with",
        source="other",
        sentinel="logprob_gap",
        plant=the_cache_outlives_its_weights,
        settings=(
            "trainer.policy.optimizer_config.lr=0.1",
            "data.train_data=[world:github?split=train&count=4]",
        ),
        shows_later=True,
    ),
    Bug(
        name="the optimizer never steps",
        source="other",
        sentinel="moved_weights",
        plant=nothing_is_applied,
    ),
    Bug(
        name="new weights never arrive at the engine",
        source="other",
        sentinel="engine_weights",
        plant=the_engine_has_weights_of_its_own,
    ),
    Bug(
        name="a copy of the weights is incomplete",
        source="Fleet 56",
        sentinel="engine_weights",
        plant=the_engine_gets_half_of_the_weights,
    ),
    Bug(
        name="the sync does not update the engines' version",
        source="SkyRL 16",
        sentinel="served_version",
        plant=engines_keep_their_version,
    ),
    Bug(
        name="episodes are staler than allowed",
        source="SkyRL 16",
        sentinel="policy_version",
        plant=the_engine_is_a_version_behind,
    ),
    Bug(
        name="the engine keeps old weights and reports their version",
        source="SkyRL 16",
        sentinel="logprob_gap",
        plant=the_engine_stays_where_it_was,
        settings=("trainer.policy.optimizer_config.lr=0.1",),
        shows_later=True,
        expected_text="cause: stale version",
    ),
    Bug(
        name="the learning rate is far too high and the entropy collapses",
        source="Fleet 20",
        sentinel="entropy_collapse",
        plant=the_rate_is_far_too_high,
        shows_later=True,
    ),
)
