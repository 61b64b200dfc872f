"""Schedules of simulated runs, worked by hand, and what no schedule may break."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import pytest

from skyfleet.simulation.engine import SimulatedEngine
from skyfleet.simulation.loops import LoopSettings
from skyfleet.simulation.rollouts import HostCosts
from skyfleet.simulation.run import SimulatedRun, SimulatedSystem, simulate
from skyfleet.simulation.virtual_time import run_in_virtual_time
from skyfleet.simulation.workload import EpisodePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A token takes one second, times the sequences if `shares`; ten prompt tokens take one."""

    max_running: int = 8
    kv_tokens: float = 1e9
    context_seconds: float = 0.0
    shares: bool = False

    def step_seconds(self, n_running: int) -> float:
        return float(n_running) if self.shares else 1.0

    def prefill_seconds(self, n_new: int, n_before: int) -> float:
        return n_new / 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Ten tokens are learnt in a second; new weights take half of one."""

    push_seconds: float = 0.5
    engine_slowdown: float = 1.0
    learner_slowdown: float = 1.0
    recomputes_cache: bool = False
    checks: float = 0.0

    def update_seconds(self, lengths: Sequence[int]) -> float:
        return sum(lengths) / 10

    def fixed_seconds(self, n_tokens: int) -> float:
        return self.checks


def plan_episode(*turns: tuple[int, int], tool: float = 0.0) -> EpisodePlan:
    return EpisodePlan(
        turns=turns, tool_seconds=(tool,) * (len(turns) - 1), reset_seconds=0, grade_seconds=0
    )


def make_system(
    draw: Callable[[int, int], EpisodePlan],
    settings: LoopSettings,
    *,
    engine: Engine | None = None,
    n_engines: int = 1,
    n_samples: int = 1,
    host: HostCosts | None = None,
    step: Step | None = None,
) -> SimulatedSystem:
    return SimulatedSystem(
        settings=settings,
        engine=engine or Engine(),
        n_engines=n_engines,
        step=step or Step(),
        host=host or HostCosts(),
        n_workers=1,
        n_samples=n_samples,
        max_concurrent=64,
        draw=draw,
    )


def test_three_episodes_on_two_engines_take_what_they_take_by_hand() -> None:
    """Engines hold one sequence each. Prefill 1 s, which samples the first token, and 4 tokens more:
    two episodes end after 5 s, the third after 10 s. 45 tokens are learnt in 4.5 s, weights take 0.5 s."""
    settings = LoopSettings(batch_size=3, n_steps=2)
    system = make_system(
        lambda group, sample: plan_episode((10, 5)),
        settings,
        engine=Engine(max_running=1),
        n_engines=2,
    )
    run = simulate(system, n_warm_up=0)
    assert [step.rollout_seconds for step in run.steps] == pytest.approx([10, 10])
    assert [step.learn_seconds for step in run.steps] == pytest.approx([4.5, 4.5])
    assert run.step_seconds == pytest.approx(15)
    assert run.tokens_per_second == pytest.approx(3)
    # Of 30 s on two engines, 15 s with episodes and twice 0.5 s with new weights.
    assert run.engine_idle == pytest.approx(1 - 16 / 30)
    assert run.learner_idle == pytest.approx(1 - 4.5 / 15)


def test_sequences_of_a_batch_slow_each_other_down_while_they_run() -> None:
    """Two seconds per token together: the shorter one ends after 2 tokens more, at 4 s; then one
    second per token: the longer one has 2 left."""
    ends = run_in_virtual_time(_generate(Engine(shares=True), (0, 3), (0, 5)))
    assert ends == pytest.approx([4, 6])


def test_context_grows_while_a_sequence_runs() -> None:
    """11 tokens after the prefill of 1 s; then three tokens: 3 x (1 + 1.1) and 0.1 x 3 x 3 / 2."""
    assert run_in_virtual_time(_generate(Engine(context_seconds=0.1), (10, 4))) == pytest.approx(
        [1 + 6.3 + 0.45]
    )


def test_a_full_kv_cache_makes_a_sequence_wait() -> None:
    ends = run_in_virtual_time(_generate(Engine(kv_tokens=10), (0, 6), (0, 6)))
    assert ends == pytest.approx([5, 10])


def test_what_sessions_hold_beyond_the_cache_is_prefilled_again() -> None:
    """A cache of half of what is open: 10 of 20 cached tokens are prefilled, in 1 s."""

    async def second_turn() -> float:
        engine = SimulatedEngine(Engine(kv_tokens=50))
        engine.open_tokens = 100
        await engine.generate(n_new=0, n_cached=20, n_sampled=1)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(second_turn()) == pytest.approx(1)


def test_tool_calls_and_the_process_of_episodes_take_their_time() -> None:
    """Prefill 1 s, 2 s of the process before each turn, a call of 7 s; the second turn's 20 new tokens
    take 2 s, and its second token one."""
    draw = plan_episode((10, 1), (20, 2), tool=7)
    system = make_system(
        lambda group, sample: draw,
        LoopSettings(batch_size=1, n_steps=1),
        host=HostCosts(turn_seconds=2.0),
    )
    (step,) = simulate(system, n_warm_up=0).steps
    assert step.rollout_seconds == pytest.approx(2 + 1 + 7 + 2 + 2 + 1)


def test_attempts_share_the_prompt_of_their_group() -> None:
    """40 tokens, of which the second attempt finds 32 in whole blocks of 16: 4 s and 0.8 s."""
    system = make_system(
        lambda group, sample: plan_episode((40, 1)),
        LoopSettings(batch_size=1, n_steps=1),
        n_samples=2,
    )
    (step,) = simulate(system, n_warm_up=0).steps
    assert step.rollout_seconds == pytest.approx(4.8)


def draw_uneven(group: int, sample: int) -> EpisodePlan:
    """A quarter of the groups takes ten times as long."""
    rng = Random(f"{group}/{sample}")
    tool = rng.expovariate(1 / (30 if group % 4 == 0 else 3))
    return plan_episode((10, rng.randint(1, 9)), (5, 3), tool=tool)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_group_is_trained_once_and_none_is_too_old(staleness: int) -> None:
    settings = LoopSettings(
        batch_size=4,
        n_steps=25,
        is_async=True,
        max_staleness_steps=staleness,
        n_workers=4 * (staleness + 1),
    )
    system = make_system(draw_uneven, settings, n_engines=2, n_samples=2)
    run = simulate_all(system)
    trained = Counter(number for step in run.steps for number in step.groups)
    assert trained == Counter(range(100))
    assert max(age for step in run.steps for age in step.staleness) == staleness


def test_asynchronous_training_without_staleness_is_the_synchronous_loop() -> None:
    sync = LoopSettings(batch_size=4, n_steps=5)
    alone = LoopSettings(batch_size=4, n_steps=5, is_async=True, n_workers=4)
    one, other = (
        simulate_all(make_system(draw_uneven, loop, n_samples=2)) for loop in (sync, alone)
    )
    assert [step.end for step in other.steps] == pytest.approx([step.end for step in one.steps])


def test_staleness_hides_episodes_behind_updates() -> None:
    def steps(staleness: int) -> SimulatedRun:
        settings = LoopSettings(
            batch_size=4,
            n_steps=20,
            is_async=True,
            max_staleness_steps=staleness,
            n_workers=4 * (staleness + 1),
        )
        return simulate_all(make_system(draw_uneven, settings, n_engines=4, n_samples=2))

    assert steps(2).step_seconds < 0.7 * steps(0).step_seconds


def test_engine_and_learner_slow_each_other_down_only_together() -> None:
    """Without episodes beside it the update takes its 1.5 s."""
    system = make_system(
        lambda group, sample: plan_episode((10, 5)),
        LoopSettings(batch_size=1, n_steps=1),
        step=Step(learner_slowdown=2.0, engine_slowdown=2.0),
    )
    (step,) = simulate(system, n_warm_up=0).steps
    assert step.learn_seconds == pytest.approx(1.5)


@pytest.mark.parametrize(("shares", "idle"), [(True, 1 - 15.5 / 17), (False, 1 - 5.5 / 17)])
def test_the_loops_own_work_stops_engines_of_its_own_process_only(
    shares: bool, idle: float
) -> None:
    """An episode of 5 s, 10 s of checks, an update of 1.5 s, and 0.5 s for the weights."""
    system = make_system(
        lambda group, sample: plan_episode((10, 5)),
        LoopSettings(batch_size=1, n_steps=1),
        host=HostCosts(shares_engine_thread=shares),
        step=Step(checks=10.0),
    )
    run = simulate(system, n_warm_up=0)
    assert run.step_seconds == pytest.approx(17)
    assert run.engine_idle == pytest.approx(idle)


def test_a_simulation_that_waits_for_nothing_says_so() -> None:
    async def wait_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="never happens"):
        run_in_virtual_time(wait_for_ever())


async def _generate(costs: Engine, *requests: tuple[int, int]) -> list[float]:
    """When requests end that start together, by prompt and sampled tokens."""
    engine, loop = SimulatedEngine(costs), asyncio.get_running_loop()

    async def ask(n_new: int, n_sampled: int) -> float:
        await engine.generate(n_new=n_new, n_cached=0, n_sampled=n_sampled)
        return loop.time()

    return list(await asyncio.gather(*(ask(*request) for request in requests)))


def simulate_all(system: SimulatedSystem) -> SimulatedRun:
    """With the last steps, in which nothing is started any more."""
    from skyfleet.simulation.run import simulate_steps

    steps = simulate_steps(system)
    return SimulatedRun(steps=tuple(steps), n_engines=system.n_engines, n_workers=1)
