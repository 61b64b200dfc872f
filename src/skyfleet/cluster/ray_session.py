"""RaySession: joins or starts a Ray cluster for a run, checks it, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import warnings
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, TypeVar

from skyfleet.cluster.placement import Placement, check_fits
from skyfleet.cluster.ray_calls import ActorLostError, call_actor
from skyfleet.errors import ClusterError, MissingExtraError

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 200 << 20
"""Of a cluster that a run starts: messages are small, and weights do not travel through it."""
CONNECT_SECONDS = 10.0
PROBE_SECONDS = 120.0
"""For the first task on a node, which starts a process there."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node of the cluster."""

    id: str
    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession:
    nodes: Sequence[Node]
    """When the session was opened; `list_nodes` asks again."""
    is_local: bool

    async def list_nodes(self) -> list[Node]:
        return await asyncio.to_thread(_list_nodes)


def require_ray() -> None:
    if find_spec("ray") is None:
        raise MissingExtraError("ray", "ray")


@asynccontextmanager
async def open_ray(
    placement: Placement, *, ready_timeout_seconds: float
) -> AsyncIterator[RaySession]:
    """Join the cluster of RAY_ADDRESS, or start one on this machine that ends with the run.

    Inside `ray job submit` the address is set. A process that has called `ray.init` keeps its own.
    """
    require_ray()
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    is_own = not ray.is_initialized()
    is_local = is_own and address in ("", "local")
    if is_own:
        if not is_local:
            _check_address(address)
        _init(placement, is_local=is_local)
    try:
        nodes = await _wait_for_resources(
            placement, timeout_seconds=0 if is_local else ready_timeout_seconds
        )
        await _check_versions(nodes)
        yield RaySession(nodes=nodes, is_local=is_local)
    finally:
        if is_own:
            ray.shutdown()


def _init(placement: Placement, *, is_local: bool) -> None:
    import ray

    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    if is_local:
        # Logical CPUs: on a laptop processes share them, and the placement fits anyway.
        n_cpus = max(os.cpu_count() or 1, placement.n_processes * placement.gpus_per_engine)
        options |= {"num_cpus": n_cpus, "object_store_memory": OBJECT_STORE_BYTES}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        with warnings.catch_warnings():
            # Ray announces there what a later version will do with GPUs of actors that ask for none.
            warnings.simplefilter("ignore", FutureWarning)
            ray.init(logging_level=logging.ERROR, configure_logging=False, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ClusterError(
            f"the Ray cluster cannot be used ({reason}); check RAY_ADDRESS and `ray status`, or unset "
            "RAY_ADDRESS to start one here"
        ) from error


def _check_address(address: str) -> None:
    """A wrong address is one sentence after seconds; Ray itself tries for a minute."""
    if address == "auto":
        return
    if "://" in address:
        raise ClusterError(
            f"RAY_ADDRESS={address!r} is an address for Ray's client, whose driver is far from the "
            "cluster; submit the command with `ray job submit -- skyfleet train CONFIG`"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"RAY_ADDRESS={address!r} cannot be reached ({error}); start the cluster with `ray start "
            "--head`, correct the address, or unset it to start one here"
        ) from None


def _list_nodes() -> list[Node]:
    import ray

    nodes: Any = ray.nodes()
    return [
        Node(id=node["NodeID"], address=node["NodeManagerAddress"], resources=node["Resources"])
        for node in nodes
        if node["Alive"]
    ]


async def _wait_for_resources(placement: Placement, *, timeout_seconds: float) -> list[Node]:
    """Nodes may still be starting. ClusterError says what is missing at the end."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    while True:
        nodes = await asyncio.to_thread(_list_nodes)
        try:
            check_fits(placement, [node.resources for node in nodes])
        except ClusterError as error:
            if loop.time() < deadline:
                await asyncio.sleep(1.0)
                continue
            waited = f" (after {timeout_seconds:g} s)" if timeout_seconds else ""
            raise ClusterError(f"{error}{waited}") from None
        return nodes


def read_versions() -> tuple[str, str]:
    """Of this process: skyfleet and Python."""
    return version("skyfleet"), platform.python_version()


async def _check_versions(nodes: Sequence[Node]) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = ray.remote(read_versions)
    calls = [
        probe.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote()
        for node in nodes
    ]
    found: dict[str, tuple[str, str] | str] = {}
    for node, call in zip(nodes, calls, strict=True):
        try:
            found[node.address] = await asyncio.wait_for(_await(call), PROBE_SECONDS)
        except TimeoutError:
            found[node.address] = f"it did not answer within {PROBE_SECONDS:g} s"
        except Exception as error:  # whatever a node without the package raises
            found[node.address] = str(error).strip().split("\n")[-1]
    check_versions(found, read_versions())


def check_versions(found: Mapping[str, tuple[str, str] | str], own: tuple[str, str]) -> None:
    """ClusterError names the first node whose packages differ from the driver's."""
    for address, versions in found.items():
        if isinstance(versions, str):
            raise ClusterError(
                f"node {address} cannot run skyfleet: {versions}; install skyfleet {own[0]} there"
            )
        if versions[0] != own[0] or versions[1].rpartition(".")[0] != own[1].rpartition(".")[0]:
            raise ClusterError(
                f"node {address} has skyfleet {versions[0]} on Python {versions[1]}, and the driver "
                f"skyfleet {own[0]} on Python {own[1]}; install the same on every node"
            )


async def open_placement_group(
    bundles: Sequence[dict[str, float]], opened: AsyncExitStack, timeout_seconds: float
) -> Any:
    """Reserved as a whole. Ray moves the bundles of a node that is lost to others."""
    import ray

    group = ray.util.placement_group(list(bundles), strategy="PACK")
    opened.callback(ray.util.remove_placement_group, group)
    try:
        await call_actor(group.ready(), timeout_seconds)
    except ActorLostError:
        raise ClusterError(
            f"the cluster reserved no {len(bundles)} bundles of {dict(bundles[0])} within "
            f"trainer.placement.ready_timeout_seconds={timeout_seconds:g}; another job may hold its "
            "resources: see `ray status`"
        ) from None
    return group


def find_own_address() -> str:
    """Of this node, for processes on others."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


async def _await(call: Awaitable[ResultT]) -> ResultT:
    return await call
