"""Cluster: the actors of one run, opened by the trainer if `trainer.placement.use_ray` is set."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from skyfleet.chat.renderers import build_renderer
from skyfleet.cluster.placement import Placement, plan_placement
from skyfleet.cluster.rank_actors import RayRankGroup, open_ranks
from skyfleet.cluster.ray_engines import EngineActors, start_engines
from skyfleet.cluster.ray_session import RaySession, open_ray, require_ray
from skyfleet.cluster.ray_workers import open_rollout_pool
from skyfleet.cluster.rollout_pool import RolloutPool
from skyfleet.config.root import RunConfig
from skyfleet.engines.engine import Engine
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.registry import env_factory
from skyfleet.errors import ConfigError
from skyfleet.learner.learner import Learner
from skyfleet.learner.policy_model import PolicyModel
from skyfleet.learner.rank_layout import build_layout
from skyfleet.learner.rank_process import is_started_by_torchrun
from skyfleet.learner.sharded import RankGroup
from skyfleet.rollouts.episode import EpisodeRunner, run_episode


@dataclass(slots=True, kw_only=True)
class Cluster:
    placement: Placement
    session: RaySession
    rollouts: RolloutPool | None
    """None: the driver plays episodes."""
    actors: EngineActors | None = None
    """Once they are started; None: the engine has the weights of a learner in the driver."""
    ranks: RayRankGroup | None = None
    """Once they are started; None: the learner is in the driver."""
    opened: AsyncExitStack
    """Closed before Ray."""

    @property
    def run_episode(self) -> EpisodeRunner:
        return run_episode if self.rollouts is None else self.rollouts.run

    async def open_ranks(self, config: RunConfig, policy: str, total_steps: int) -> RankGroup:
        """The learner's ranks, with the policy at a path that every node can read."""
        self.ranks = await open_ranks(config, self.placement, policy, total_steps, self.opened)
        return self.ranks

    def make_engine_starter(
        self, config: RunConfig, policy_model: PolicyModel, learner: Learner
    ) -> Callable[[str, AsyncExitStack], Awaitable[list[Engine]]] | None:
        """Starts engines that serve models of this shape; None if the placement has none."""
        if not self.placement.n_engines:
            return None

        async def start(model_path: str, opened: AsyncExitStack) -> list[Engine]:
            self.actors = await start_engines(
                config,
                self.placement,
                policy_model,
                model_path,
                opened,
                learner=learner,
                ranks=self.ranks,
            )
            return list(self.actors.engines)

        return start


def check_cluster(config: RunConfig, *, uses_gpus: bool) -> Placement:
    """Everything that can be checked before Ray is started."""
    require_ray()
    if is_started_by_torchrun():
        raise ConfigError(
            "trainer.placement.use_ray=true starts the learner's ranks, and torchrun has started some; "
            "start one process, or set trainer.placement.use_ray=false"
        )
    placement = plan_placement(config, uses_gpus=uses_gpus)
    if placement.n_ranks:
        build_layout(config, placement.n_ranks)
    return placement


@asynccontextmanager
async def open_cluster(
    config: RunConfig,
    placement: Placement,
    open_env: EnvFactory,
    *,
    env_is_given: bool,
    on_progress: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Cluster]:
    """`env_is_given`: `open_env` is an object of the user's, not what the configuration names."""
    seconds = config.trainer.placement.ready_timeout_seconds
    async with AsyncExitStack() as opened:
        session = await opened.enter_async_context(
            open_ray(placement, ready_timeout_seconds=seconds)
        )
        on_progress(f"Ray: {len(session.nodes)} nodes, {placement.describe()}")
        rollouts = None
        if placement.workers_per_node:
            rollouts = await opened.enter_async_context(
                open_rollout_pool(
                    session,
                    workers_per_node=placement.workers_per_node,
                    ready_timeout_seconds=seconds,
                    make_renderer=partial(build_renderer, config.generator),
                )
            )
            rollouts.add_env(open_env, None if env_is_given else partial(env_factory, config))
        yield Cluster(placement=placement, session=session, rollouts=rollouts, opened=opened)
