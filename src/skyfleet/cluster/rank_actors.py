"""RayRankGroup: the ranks of a sharded learner as Ray actors."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

from skyfleet.cluster.placement import Placement
from skyfleet.cluster.ray_calls import describe_loss, kill_actor
from skyfleet.cluster.ray_session import open_placement_group
from skyfleet.config.root import RunConfig
from skyfleet.errors import LearnerLostError
from skyfleet.learner.rank_worker import RankPlace, RankReport, RankWorker
from skyfleet.weight_transfer.buckets import TransferReport
from skyfleet.weight_transfer.sender import WeightSender

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""How long the other ranks may take to answer after one has failed."""
RESUME = "the run goes on from the last checkpoint and its journal"


class RankActor:
    """One rank. Rank 0 also sends weights to engines, so that they never pass through the driver."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._worker: RankWorker | None = None
        self._sender: WeightSender | None = None

    def find_address(self) -> str:
        """Host and a free port of this node, where the ranks can meet."""
        import ray

        host: str = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{host}:{probe.getsockname()[1]}"

    def build(self, place: RankPlace, policy: str, total_steps: int) -> None:
        self._worker = RankWorker(self._config, place, policy=policy, total_steps=total_steps)
        self._is_first = place.rank == 0

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        result = getattr(self._worker, method)(*arguments)
        has_failed = isinstance(result, RankReport) and result.error is not None
        return result if self._is_first or has_failed else None

    def iterate(self, method: str) -> Iterator[Any]:
        yield from getattr(self._worker, method)()

    def drain(self, method: str) -> None:
        for _ in getattr(self._worker, method)():
            pass

    def open_sender(self, options: dict[str, Any]) -> str:
        self._sender = WeightSender(**options)
        return self._sender.address

    def send_weights(self, version: int) -> TransferReport | None:
        """Every rank takes part in gathering them; rank 0 sends."""
        assert self._worker is not None
        if self._sender is None:
            self.drain("named_weights")
            return None
        weights = self._worker.named_weights()
        try:
            return self._sender.send(weights, version=version)
        finally:
            for _ in weights:  # an engine was lost: the other ranks wait in their gathers
                pass

    def close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


class RayRankGroup:
    """A `RankGroup`. Every method blocks."""

    def __init__(self, actors: Sequence[Any], *, timeout_seconds: float) -> None:
        self._actors, self._timeout_seconds = list(actors), timeout_seconds
        self._lost = ""

    @property
    def world_size(self) -> int:
        return len(self._actors)

    def build(self, policy: str, total_steps: int) -> None:
        calls = [actor.find_address.remote() for actor in self._actors]
        addresses: list[Any] = self._collect("find_address", calls)
        local_ranks: dict[str, int] = {}
        calls = []
        for rank, (actor, address) in enumerate(zip(self._actors, addresses, strict=True)):
            host = address.rpartition(":")[0]
            place = RankPlace(
                rank=rank,
                world_size=self.world_size,
                address=addresses[0],
                local_rank=local_ranks.get(host, 0),
            )
            local_ranks[host] = place.local_rank + 1
            calls.append(actor.build.remote(place, policy, total_steps))
        self._collect("build", calls)

    def call(self, method: str, *arguments: Any) -> Any:
        import ray

        # Put once: every rank on a node reads the same memory.
        shared = ray.put(arguments)
        return self._collect(method, [a.call.remote(method, shared) for a in self._actors])[0]

    def call_ranks(self, method: str, *arguments: Any) -> Any:
        """A method of the actors themselves; returns what rank 0 returns."""
        return self._collect(
            method, [getattr(actor, method).remote(*arguments) for actor in self._actors]
        )[0]

    def call_first(self, method: str, *arguments: Any) -> Any:
        return self._collect(method, [getattr(self._actors[0], method).remote(*arguments)])[0]

    def find_host(self) -> str:
        """The address of the node of rank 0."""
        address: str = self.call_first("find_address")
        return address.rpartition(":")[0]

    def iterate(self, method: str) -> Iterator[Any]:
        import ray

        self._check()
        first, *others = self._actors
        draining = [actor.drain.remote(method) for actor in others]
        items = first.iterate.options(
            num_returns="streaming", _generator_backpressure_num_objects=2
        ).remote(method)
        try:
            for item in items:
                yield ray.get(item, timeout=self._timeout_seconds)
        except ray.exceptions.RayActorError as error:
            self._lose(f"rank 0 of the learner died ({describe_loss(error)})")
        self._collect(method, draining)

    def close(self) -> None:
        self._lost = self._lost or "the learner is closed"
        for actor in self._actors:
            kill_actor(actor)

    def _collect(self, method: str, calls: Sequence[Any]) -> list[Any]:
        """The results of all ranks; what a rank raises is raised here."""
        import ray

        self._check()
        waiting, results = dict(zip(calls, range(len(calls)), strict=True)), [None] * len(calls)
        deadline, errors = monotonic() + self._timeout_seconds, list[Exception]()
        failures: list[Exception] = []
        while waiting and (left := deadline - monotonic()) > 0:
            done, _ = ray.wait(list(waiting), timeout=left)
            for call in done:
                rank = waiting.pop(call)
                try:
                    results[rank] = result = ray.get(call)
                    if isinstance(result, RankReport) and result.error is not None:
                        failures.append(result.error)
                except ray.exceptions.RayActorError as error:
                    reason = describe_loss(error)
                    errors.insert(0, LearnerLostError(f"rank {rank} of the learner died: {reason}"))
                except ray.exceptions.RayTaskError as error:
                    cause = error.cause
                    errors.append(cause if isinstance(cause, Exception) else error)
                # The others may wait in a collective for what does not come.
                if errors or failures:
                    deadline = min(deadline, monotonic() + GRACE_SECONDS)
        if deaths := [error for error in errors if isinstance(error, LearnerLostError)]:
            self._lose(str(deaths[0]))
        if errors:
            raise errors[0]
        if failures and (
            waiting or not isinstance(results[0], RankReport) or results[0].error is None
        ):
            self._lost = f"the learner has lost ranks: {failures[0]}"
            raise failures[0]
        if waiting:
            self._lose(
                f"rank {min(waiting.values())} of the learner has not finished {method} in "
                f"trainer.placement.rank_timeout_seconds={self._timeout_seconds:g}"
            )
        return results

    def _check(self) -> None:
        if self._lost:
            raise LearnerLostError(self._lost)

    def _lose(self, reason: str) -> None:
        self._lost = f"{reason}; {RESUME}"
        raise LearnerLostError(self._lost)


class RankSender:
    """Weights from rank 0 to engines; the driver holds none."""

    def __init__(self, group: RayRankGroup, options: dict[str, Any]) -> None:
        self._group = group
        self.address: str = group.call_first("open_sender", options)

    def send(self, version: int) -> TransferReport:
        report: TransferReport = self._group.call_ranks("send_weights", version)
        return report

    def close(self) -> None:
        self._group.call_first("close_sender")


async def open_ranks(
    config: RunConfig,
    placement: Placement,
    policy: str,
    total_steps: int,
    opened: AsyncExitStack,
) -> RayRankGroup:
    """Start the ranks, one bundle of the placement group per node, closed with `opened`."""
    place = config.trainer.placement
    bundles = placement.rank_bundles
    reserved = await open_placement_group(bundles, opened, place.ready_timeout_seconds)
    actors = [
        _create_rank(config, reserved, rank // placement.ranks_per_node, placement.uses_gpus)
        for rank in range(placement.n_ranks)
    ]
    group = RayRankGroup(actors, timeout_seconds=place.rank_timeout_seconds)
    opened.callback(group.close)
    await asyncio.to_thread(group.build, policy, total_steps)
    return group


def _create_rank(config: RunConfig, reserved: Any, bundle: int, uses_gpus: bool) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor: Any = RankActor
    return (
        ray.remote(actor)
        .options(
            num_cpus=1,
            num_gpus=int(uses_gpus),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                reserved, placement_group_bundle_index=bundle
            ),
        )
        .remote(config)
    )
