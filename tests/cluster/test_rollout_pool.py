"""The rollout pool: episodes on workers are those of one process, and none is lost with a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from threading import Lock

import pytest
from tests.fakes.counter_env import CounterEnv
from tests.fakes.local_workers import LocalWorkers, SeededEngine, open_counter, seeded_agent

from skyfleet.chat.transcript import Completion
from skyfleet.cluster import episode_player
from skyfleet.cluster import rollout_pool as rollout_pool_module
from skyfleet.cluster.pool_worker import NodeLostError, WorkerConnection
from skyfleet.cluster.rollout_pool import RolloutPool
from skyfleet.engines.engine_downtime import record_engine_downtime
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import EnvFactory
from skyfleet.errors import ClusterError, ContextFullError, EngineError, ModelError
from skyfleet.rollouts.episode import EpisodeRunner, Limits, collect, run_episode
from skyfleet.rollouts.scripted_agents import null_policy
from skyfleet.sentinels.recording_engine import RecordingEngine
from skyfleet.tasks.task import Task
from skyfleet.tracking.tracing import EpisodeSpans
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory

LIMITS = Limits(max_turns=3, max_input_length=10_000, trajectory_timeout_seconds=20)
TASKS = [Task(key=f"t{i}", env_key="counter", prompt="reach 3") for i in range(4)]


@asynccontextmanager
async def rollout_pool(
    n_workers: int = 2, *, deadly: str = ""
) -> AsyncIterator[tuple[RolloutPool, LocalWorkers]]:
    pool, workers = RolloutPool(), LocalWorkers(deadly)
    for number in range(n_workers):
        pool.add_worker(f"w{number}", workers.open)
    await pool.wait_ready(10)
    try:
        yield pool, workers
    finally:
        await pool.close()


async def play(
    engine: SeededEngine | RecordingEngine, run: EpisodeRunner, *, n_samples: int = 3
) -> list[Group]:
    return await collect(
        TASKS,
        open_counter,
        seeded_agent(engine),
        LIMITS,
        n_samples=n_samples,
        max_concurrent=8,
        run=run,
    )


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - it is another thread that changes it
        await asyncio.sleep(0.005)


def without_times(groups: list[Group]) -> list[list[Trajectory]]:
    return [
        [
            replace(
                t,
                seconds=0.0,
                turns=tuple(replace(turn, engine_seconds=0.0, env_seconds=0.0) for turn in t.turns),
            )
            for t in group.trajectories
        ]
        for group in groups
    ]


async def test_workers_play_the_trajectories_of_one_process_with_its_sessions() -> None:
    own, remote = SeededEngine(), SeededEngine()
    expected = await play(own, run_episode)
    async with rollout_pool() as (pool, workers):
        groups = await play(remote, pool.run)
    assert without_times(groups) == without_times(expected)
    played = [trajectory for group in groups for trajectory in group.trajectories]
    assert all(set(t.transcripts[0].policy_versions) == {7} for t in played)
    assert sorted(remote.sessions) == sorted(own.sessions)
    assert sorted(remote.released) == sorted(own.released)
    assert all(worker.n_sent > 0 for worker in workers.opened)


async def test_episodes_of_a_dead_worker_are_played_again_and_finished_ones_are_not() -> None:
    expected = await play(SeededEngine(), run_episode)
    engine, finished = SeededEngine(seconds=0.02), list[Trajectory]()
    recording = RecordingEngine(engine)
    async with rollout_pool() as (pool, workers):
        first = workers.opened[0]

        def kill_early(trajectory: Trajectory) -> None:
            finished.append(trajectory)
            if len(finished) == 2:
                first.kill()

        groups = await collect(
            TASKS,
            open_counter,
            seeded_agent(recording),
            LIMITS,
            n_samples=3,
            max_concurrent=8,
            on_finished=kill_early,
            run=pool.run,
        )
        n_replayed = pool.n_replayed
    assert n_replayed > 0
    assert without_times(groups) == without_times(expected)
    places = [(t.task_key, t.sample) for t in finished]
    assert len(places) == len(set(places)) == 12
    transcripts, n_lost = recording.drain(groups)
    # What was sampled for episodes that were played again is in no transcript and is not counted.
    assert n_lost == 0
    for recorded in transcripts:
        assert recorded.transcript.loss_mask.count(True) == recorded.n_sampled


async def test_a_session_is_released_before_its_episode_is_played_again() -> None:
    engine = SeededEngine(seconds=0.05)
    async with rollout_pool(1) as (pool, workers):
        playing = asyncio.create_task(
            pool.run(TASKS[0], open_counter, seeded_agent(engine), LIMITS)
        )
        await until(lambda: len(engine.sessions) == 2)
        workers.opened[0].kill()
        trajectory = await playing
    assert trajectory.ending in (Ending.DONE, Ending.MAX_TURNS)
    assert engine.released == ["t0/0", "t0/0"]
    assert engine.n_running == 0


async def test_an_episode_that_kills_its_worker_fails_alone() -> None:
    async with rollout_pool(2, deadly="t0") as (pool, _):
        groups = await play(SeededEngine(seconds=0.01), pool.run, n_samples=1)
    (bad,), *others = [group.trajectories for group in groups]
    assert bad.grade is None
    assert bad.failure is not None
    assert "task t0 kills the process that plays it" in bad.failure.detail
    assert all(attempt.failure is None for (attempt,) in others)


class FailingEngine(SeededEngine):
    def __init__(self, error: Exception, *, lost_seconds: float = 0.0) -> None:
        super().__init__()
        self._error, self._lost_seconds = error, lost_seconds

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        record_engine_downtime(self._lost_seconds, "the server is away")
        if self._lost_seconds:
            await asyncio.sleep(60)
        raise self._error


async def run_first(pool: RolloutPool, engine: SeededEngine, limits: Limits = LIMITS) -> Trajectory:
    return await pool.run(TASKS[0], open_counter, seeded_agent(engine), limits)


async def test_an_engine_error_ends_the_episode_as_in_one_process() -> None:
    by_server = ContextFullError("too long")
    by_server.is_by_server = True
    async with rollout_pool(1) as (pool, _):
        failed = await run_first(pool, FailingEngine(EngineError("no answer")))
        full = await run_first(pool, FailingEngine(ContextFullError("full")))
        refused = await run_first(pool, FailingEngine(by_server))
        with pytest.raises(ModelError, match="the engine is lost"):
            await run_first(pool, FailingEngine(ModelError("the engine is lost")))
    assert failed.failure is not None
    assert (failed.failure.kind, failed.failure.detail) == ("EngineError", "no answer")
    assert full.ending is Ending.CONTEXT_FULL
    assert refused.failure is not None
    assert "the server calls the first prompt too long" in refused.failure.detail


async def test_a_limit_that_passes_while_the_engine_is_away_gives_no_grade() -> None:
    engine = FailingEngine(EngineError(""), lost_seconds=0.5)
    limits = replace(LIMITS, trajectory_timeout_seconds=1)
    async with rollout_pool(1) as (pool, _):
        trajectory = await run_first(pool, engine, limits)
    assert trajectory.grade is None
    assert trajectory.failure is not None
    assert "0.5 s were lost to failed" in trajectory.failure.detail
    assert "the server is away" in trajectory.failure.detail


async def test_cancelled_episodes_leave_no_request_and_no_session() -> None:
    engine = SeededEngine(seconds=30)
    async with rollout_pool(2) as (pool, _):
        playing = asyncio.create_task(play(engine, pool.run))
        await until(lambda: engine.n_running == 8)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await until(lambda: not pool.n_open)
        assert engine.n_running == 0
        assert sorted(engine.released) == sorted(engine.sessions)


async def test_an_agent_without_an_engine_plays_in_a_worker_too() -> None:
    async with rollout_pool(1) as (pool, _):
        trajectory = await pool.run(TASKS[0], open_counter, null_policy, LIMITS)
    assert trajectory.ending is Ending.DONE
    assert trajectory.transcripts == ()


async def test_an_environment_that_cannot_be_sent_is_one_sentence() -> None:
    lock = Lock()

    async def open_locked(task: Task) -> CounterEnv:
        with lock:
            return CounterEnv()

    async with rollout_pool(1) as (pool, _):
        with pytest.raises(
            ClusterError, match=r"the environment cannot be sent .*=module:function"
        ):
            await pool.run(TASKS[0], open_locked, seeded_agent(SeededEngine()), LIMITS)


async def test_a_closure_travels_with_what_it_holds() -> None:
    by: list[EnvFactory] = []

    async def open_closure(task: Task) -> CounterEnv:
        assert by == []
        return CounterEnv()

    async with rollout_pool(1) as (pool, _):
        trajectory = await pool.run(TASKS[0], open_closure, seeded_agent(SeededEngine()), LIMITS)
    assert trajectory.grade is not None


async def test_without_workers_the_run_stops_after_a_while() -> None:
    async def open_nowhere() -> WorkerConnection:
        raise NodeLostError("node 1 is gone")

    pool = RolloutPool(no_worker_seconds=0.05)
    pool.add_worker("w0", open_nowhere)
    with pytest.raises(ClusterError, match=r"no rollout worker has been left for 0\.05 s"):
        await run_first(pool, SeededEngine())
    await pool.close()


async def test_workers_that_do_not_start_in_time_are_counted() -> None:
    async def open_never() -> WorkerConnection:
        await asyncio.sleep(60)
        raise AssertionError

    pool = RolloutPool()
    pool.add_worker("w0", open_never)
    with pytest.raises(ClusterError, match=r"1 of 1 rollout workers did not start within 0\.05 s"):
        await pool.wait_ready(0.05)
    await pool.close()


async def test_spans_of_a_worker_are_on_the_clock_of_the_driver() -> None:
    spans = EpisodeSpans()
    async with rollout_pool(1) as (pool, _):
        await pool.run(TASKS[0], open_counter, seeded_agent(SeededEngine()), LIMITS, spans=spans)
    names = [(span.name, span.phase) for span in spans.spans]
    assert names[:2] == [("environment", "open"), ("environment", "reset")]
    assert names.count(("engine", "generate")) == 3
    assert all(spans.start_ns <= span.start_ns <= span.end_ns for span in spans.spans)


@pytest.mark.parametrize("is_own", [True, False])
async def test_a_verifier_of_the_driver_needs_no_jail_in_a_worker_and_any_other_does(
    is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[str] = []
    monkeypatch.setattr(rollout_pool_module, "is_written_here", lambda code: is_own)
    monkeypatch.setattr(episode_player, "accept_written", accepted.append)
    task = TASKS[0].model_copy(update={"verifier_code": "def verify(): ..."})
    async with rollout_pool(1) as (pool, _):
        await pool.run(task, open_counter, null_policy, LIMITS)
    assert accepted == (["def verify(): ..."] if is_own else [])
