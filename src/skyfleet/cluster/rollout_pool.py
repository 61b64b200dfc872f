"""RolloutPool: plays episodes on rollout workers, and again on others if a worker dies.

Nothing of an episode is on the driver until it has finished; then it is whole, and the journal has
it. So an episode whose worker dies is played from its start, with the same seed, and an episode that
has finished is never played again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from time import perf_counter_ns

from skyfleet.cluster.messages import (
    Answer,
    CancelEpisode,
    CancelRequest,
    EngineDowntime,
    EpisodeFinished,
    EpisodeStopped,
    FromWorker,
    GenerateRequest,
    LogLine,
    ReleaseSession,
    StartEpisode,
    make_portable,
)
from skyfleet.cluster.plays import (
    MAX_DEATHS_ALONE,
    ForwardingClock,
    Play,
    fail_episode,
    forget,
    release,
)
from skyfleet.cluster.pool_worker import (
    NodeLostError,
    OpenWorker,
    PoolWorker,
    WorkerConnection,
    WorkerLostError,
)
from skyfleet.cluster.sources import MakeRenderer, Sources
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.verifiers.write_verifier import is_written_here
from skyfleet.envs.worker_process import pack_task
from skyfleet.errors import ClusterError, EnvError, EpisodeError
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import Limits
from skyfleet.rollouts.policy_agent import PolicyAgent
from skyfleet.tasks.task import Task
from skyfleet.tracking.tracing import EpisodeSpans
from skyfleet.trajectories.episode_clock import current_clock
from skyfleet.trajectories.trajectory import Trajectory

logger = logging.getLogger(__name__)

MAX_STARTS = 5
"""A worker that dies so often in a row before it has answered is given up."""
CLOSE_SECONDS = 30.0
"""For episodes that were cancelled to close their environments."""
BACKOFF_SECONDS = 1.0
ENVIRONMENT = "the environment"


class RolloutPool:
    """`run` has the signature of `run_episode`."""

    def __init__(
        self, *, make_renderer: MakeRenderer | None = None, no_worker_seconds: float = 300.0
    ) -> None:
        """Without a worker for `no_worker_seconds`, the run stops: their nodes are gone."""
        self._no_worker_seconds = no_worker_seconds
        self._workers: list[PoolWorker] = []
        self._waiting: deque[Play] = deque()
        self._numbers = count()
        self._sources = Sources(make_renderer)
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        """An episode has ended on its worker, or a worker has started or ended."""
        self._releases: set[asyncio.Task[None]] = set()
        self._abandoning: asyncio.TimerHandle | None = None
        self.n_replayed = 0
        """Episodes that were started again because their worker died."""

    @property
    def n_workers(self) -> int:
        return sum(worker.connection is not None for worker in self._workers)

    @property
    def n_open(self) -> int:
        """Episodes on workers."""
        return sum(len(worker.plays) for worker in self._workers)

    def add_worker(self, name: str, open_worker: OpenWorker) -> None:
        worker = PoolWorker(name, open_worker)
        self._workers.append(worker)
        worker.task = asyncio.create_task(self._serve(worker))

    async def wait_ready(self, timeout_seconds: float) -> None:
        """Until every worker has started."""
        n_workers = len(self._workers)
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._error is None and self.n_workers < n_workers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ClusterError(
                f"{n_workers - self.n_workers} of {n_workers} rollout workers did not start within "
                f"{timeout_seconds:g} s; lower generator.num_rollout_workers_per_node, or raise "
                "trainer.placement.ready_timeout_seconds"
            ) from None
        if self._error is not None:
            raise self._error

    def add_env(self, open_env: EnvFactory, build: Callable[[], EnvFactory] | None) -> None:
        """`build` returns the factory in a worker; without it the object itself is sent."""
        if build is None:
            self._sources.find(open_env, ENVIRONMENT)
        else:
            self._sources.add(open_env, build, ENVIRONMENT)

    async def run(
        self,
        task: Task,
        open_env: EnvFactory,
        policy: AgentFactory,
        limits: Limits,
        *,
        sample: int = 0,
        spans: EpisodeSpans | None = None,
    ) -> Trajectory:
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        start = StartEpisode(
            episode=number,
            task=pack_task(task),
            verifier_is_own=task.verifier_code is not None and is_written_here(task.verifier_code),
            env=self._sources.find(open_env, ENVIRONMENT),
            agent=self._sources.find(policy, "the agent"),
            sampling=policy.sampling if isinstance(policy, PolicyAgent) else None,
            limits=limits,
            sample=sample,
            is_traced=spans is not None,
        )
        play = Play(
            number,
            task,
            start,
            policy.engine if isinstance(policy, PolicyAgent) else None,
            asyncio.get_running_loop().create_future(),
            spans,
        )
        self._waiting.append(play)
        self._dispatch()
        try:
            return await play.future
        except asyncio.CancelledError:
            self._cancel(play)
            raise

    async def close(self) -> None:
        """Cancelled episodes close their environments, then the workers end."""
        for worker in self._workers:
            for play in worker.plays.values():
                worker.post(CancelEpisode(episode=play.number))
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while any(w.plays for w in self._workers if w.connection is not None):
                    self._changed.clear()
                    await self._changed.wait()
        self._error = self._error or asyncio.CancelledError()
        if self._abandoning is not None:
            self._abandoning.cancel()
        tasks = [worker.task for worker in self._workers if worker.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def fail(self, error: BaseException) -> None:
        """Nothing is played any more."""
        self._error = self._error or error
        self._changed.set()
        plays = [*self._waiting, *(p for w in self._workers for p in w.plays.values())]
        self._waiting.clear()
        for play in plays:
            if not play.future.done():
                play.future.set_exception(self._error)

    # Workers

    async def _serve(self, worker: PoolWorker) -> None:
        """Keep a worker running until its node is gone."""
        n_starts = 0
        while True:
            try:
                connection = await worker.open()
                n_starts = 0
                await self._exchange(worker, connection)
            except NodeLostError as error:
                logger.warning("rollout worker %s is gone: %s", worker.name, error)
                await self._recover(worker)
                break
            except WorkerLostError as error:
                n_starts += worker.connection is None
                logger.warning("rollout worker %s is started again: %s", worker.name, error)
                await self._recover(worker)
                if n_starts >= MAX_STARTS:
                    logger.warning(
                        "rollout worker %s is given up: it died %d times before it answered",
                        *(worker.name, n_starts),
                    )
                    break
                await asyncio.sleep(BACKOFF_SECONDS * n_starts)
            except Exception as error:
                self.fail(error)
                raise
        self._workers.remove(worker)
        if not self._workers and self._abandoning is None:
            loop = asyncio.get_running_loop()
            self._abandoning = loop.call_later(self._no_worker_seconds, self._abandon)

    def _abandon(self) -> None:
        self._abandoning = None
        if not self._workers:
            self.fail(
                ClusterError(
                    f"no rollout worker has been left for {self._no_worker_seconds:g} s: their nodes "
                    "are gone or they die at once; run the same command again to resume"
                )
            )

    async def _exchange(self, worker: PoolWorker, connection: WorkerConnection) -> None:
        worker.connection, worker.known = connection, set()
        self._dispatch()
        tasks = [
            asyncio.create_task(self._send(worker, connection)),
            asyncio.create_task(self._receive(worker, connection)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await connection.close()

    async def _send(self, worker: PoolWorker, connection: WorkerConnection) -> None:
        while True:
            await worker.has_messages.wait()
            worker.has_messages.clear()
            messages, worker.outbox = worker.outbox, []
            if messages:
                await connection.send(messages)

    async def _receive(self, worker: PoolWorker, connection: WorkerConnection) -> None:
        while True:
            for message in await connection.receive():
                self._accept(worker, message)

    async def _recover(self, worker: PoolWorker) -> None:
        """Put the worker's episodes back to the front of the queue, without a trace of their start."""
        worker.connection, worker.outbox = None, []
        worker.has_messages.clear()
        plays, worker.plays = list(worker.plays.values()), {}
        is_alone = len(plays) == 1
        for play in reversed(plays):
            play.n_deaths += 1
            play.n_deaths_alone += is_alone and play.is_suspect
            await forget(play)
            if play.future.done():  # cancelled
                continue
            if play.n_deaths_alone > MAX_DEATHS_ALONE:
                play.future.set_result(fail_episode(play))
                continue
            self.n_replayed += 1
            self._waiting.appendleft(play)
        self._dispatch()

    # Episodes

    def _dispatch(self) -> None:
        """Start waiting episodes, each on the worker with the fewest."""
        self._changed.set()
        for _ in range(len(self._waiting)):
            play = self._waiting.popleft()
            if play.future.done():
                continue
            able = [worker for worker in self._workers if worker.accepts(play)]
            if not able:
                self._waiting.append(play)
                continue
            worker = min(able, key=lambda worker: len(worker.plays))
            worker.plays[play.number] = play
            play.started_ns = perf_counter_ns()
            for key in (play.start.env, play.start.agent):
                if key not in worker.known:
                    worker.known.add(key)
                    worker.post(self._sources[key])
            worker.post(play.start)

    def _cancel(self, play: Play) -> None:
        for worker in self._workers:
            if play.number in worker.plays:
                worker.post(CancelEpisode(episode=play.number))

    def _accept(self, worker: PoolWorker, message: FromWorker) -> None:
        match message:
            case LogLine(logger=name, level=level, text=text):
                logging.getLogger(name).log(level, "%s (rollout worker %s)", text, worker.name)
            case GenerateRequest(episode=number, request=request):
                play = worker.plays[number]
                task = asyncio.create_task(self._generate(worker, play, message))
                play.requests[request] = task
                task.add_done_callback(lambda _: play.requests.pop(request, None))
            case CancelRequest(request=request):
                for play in worker.plays.values():
                    if request in play.requests:
                        play.requests[request].cancel()
            case ReleaseSession(episode=number, session=session):
                task = asyncio.create_task(release(worker.plays[number], session))
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)
            case EpisodeFinished(episode=number):
                play = worker.plays.pop(number)
                if play.spans is not None:
                    play.spans.spans += (
                        part._replace(
                            start_ns=part.start_ns + play.started_ns,
                            end_ns=part.end_ns + play.started_ns,
                        )
                        for part in message.spans
                    )
                if not play.future.done():
                    play.future.set_result(message.trajectory)
                self._dispatch()
            case EpisodeStopped(episode=number, error=error):
                play = worker.plays.pop(number)
                if not play.future.done():
                    play.future.set_exception(
                        error or EnvError("its rollout worker cancelled the episode")
                    )
                self._dispatch()

    async def _generate(self, worker: PoolWorker, play: Play, request: GenerateRequest) -> None:
        assert play.engine is not None
        number = request.request

        def report(seconds: float, problem: str) -> None:
            worker.post(EngineDowntime(request=number, seconds=seconds, problem=problem))

        # What an engine records on the clock of an episode is recorded on the worker's.
        current_clock.set(ForwardingClock(play.start.limits.trajectory_timeout_seconds, report))
        token_ids, session = request.token_ids.tolist(), request.session
        try:
            completion = await play.engine.generate(token_ids, request.sampling, session=session)
        except EpisodeError as error:
            worker.post(Answer(request=number, error=make_portable(error)))
        except Exception as error:
            worker.post(CancelEpisode(episode=play.number))
            if not play.future.done():
                play.future.set_exception(error)
        else:
            if completion.finish != "abort":
                play.completions[session] += 1
            worker.post(Answer(request=number, completion=completion))
