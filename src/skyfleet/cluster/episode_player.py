"""EpisodePlayer: the part of a rollout worker that plays episodes, in an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import pickle
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from threading import Condition, Event, Thread
from time import perf_counter_ns
from typing import Any

from skyfleet.chat.transcript import Completion
from skyfleet.cluster.messages import (
    AddSource,
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
    ToWorker,
    make_portable,
)
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.verifiers.write_verifier import accept_written
from skyfleet.errors import ClusterError, SkyfleetError
from skyfleet.rollouts.episode import run_episode
from skyfleet.rollouts.policy_agent import PolicyAgent
from skyfleet.tasks.task import Task
from skyfleet.tracking.tracing import EpisodeSpans, Span
from skyfleet.trajectories.episode_clock import EpisodeClock, current_clock


class EpisodePlayer:
    """`send` and `receive` may be called by any thread; episodes run in a thread of their own.

    So a worker answers, and its log is read, while an environment blocks the event loop.
    """

    def __init__(self) -> None:
        self._outbox: list[FromWorker] = []
        self._has_messages = Condition()
        self._sources: dict[int, AddSource] = {}
        self._built: dict[int, Any] = {}
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._pending: dict[int, asyncio.Future[Completion]] = {}
        self._clocks: dict[int, EpisodeClock | None] = {}
        self._numbers = count()
        self._loop = asyncio.new_event_loop()
        self._is_running = Event()
        Thread(target=self._run_loop, name="episodes", daemon=True).start()
        self._is_running.wait()

    def send(self, messages: Sequence[ToWorker]) -> None:
        self._loop.call_soon_threadsafe(self._accept, messages)

    def receive(self, timeout_seconds: float) -> list[FromWorker]:
        """Everything since the last call, as soon as there is anything; empty after the timeout."""
        with self._has_messages:
            self._has_messages.wait_for(lambda: self._outbox, timeout_seconds)
            messages, self._outbox = self._outbox, []
        return messages

    def forward_log(self) -> None:
        """Send what this process logs, in the place of writing it."""
        root = logging.getLogger("skyfleet")
        root.addHandler(_LogForwarder(self._post))
        root.propagate = False

    def close(self) -> None:
        """Cancel what runs; its environments are closed before the loop ends."""
        self._loop.call_soon_threadsafe(self._cancel_all)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._is_running.set)
        self._loop.run_forever()
        self._loop.close()

    def _cancel_all(self) -> None:
        async def end() -> None:
            for task in (tasks := list(self._episodes.values())):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        self._ending = self._loop.create_task(end())

    def _post(self, message: FromWorker) -> None:
        with self._has_messages:
            self._outbox.append(message)
            self._has_messages.notify()

    def _accept(self, messages: Sequence[ToWorker]) -> None:
        for message in messages:
            match message:
                case AddSource(key=key):
                    self._sources[key] = message
                case StartEpisode(episode=number):
                    self._episodes[number] = self._loop.create_task(self._play(message))
                case CancelEpisode(episode=number):
                    if task := self._episodes.get(number):
                        task.cancel()
                case Answer(request=request):
                    self._answer(message, self._pending.pop(request, None))
                case EngineDowntime(request=request, seconds=seconds, problem=problem):
                    if (clock := self._clocks.get(request)) is not None:
                        clock.add_engine_downtime(seconds, problem)

    def _answer(self, answer: Answer, future: asyncio.Future[Completion] | None) -> None:
        if future is None or future.done():  # the episode's time was over
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        elif answer.completion is not None:
            future.set_result(answer.completion)

    async def _play(self, start: StartEpisode) -> None:
        number, spans = start.episode, EpisodeSpans() if start.is_traced else None
        try:
            agent = self._build(start.agent)
            if isinstance(agent, PolicyAgent):
                assert start.sampling is not None
                engine = _ForwardingEngine(self, number)
                agent = replace(agent, engine=engine, sampling=start.sampling)
            task: Task = pickle.loads(start.task)
            if start.verifier_is_own and task.verifier_code is not None:
                accept_written(task.verifier_code)
            trajectory = await run_episode(
                task,
                self._build(start.env),
                agent,
                start.limits,
                sample=start.sample,
                spans=spans,
            )
            parts = () if spans is None else _count_from(spans.spans, spans.start_ns)
            self._post(EpisodeFinished(episode=number, trajectory=trajectory, spans=parts))
        except asyncio.CancelledError:
            self._post(EpisodeStopped(episode=number))
        except SkyfleetError as error:
            self._post(EpisodeStopped(episode=number, error=make_portable(error)))
        except Exception as error:  # also of a user's class that cannot be unpickled here
            reason = f"{type(error).__name__}: {error}"
            self._post(EpisodeStopped(episode=number, error=ClusterError(reason)))
        finally:
            del self._episodes[number]

    def _build(self, key: int) -> Any:
        if key not in self._built:
            source = self._sources[key]
            try:
                self._built[key] = pickle.loads(source.packed)()
            except ImportError as error:
                raise ClusterError(
                    f"{source.what} cannot be loaded in a rollout worker ({error}); install its "
                    "module on every node, or set generator.num_rollout_workers_per_node=0"
                ) from error
        return self._built[key]

    async def generate(
        self, episode: int, token_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        request = next(self._numbers)
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._pending[request], self._clocks[request] = future, current_clock.get()
        self._post(
            GenerateRequest(
                episode=episode,
                request=request,
                token_ids=array("q", token_ids),
                sampling=sampling,
                session=session,
            )
        )
        try:
            return await future
        except asyncio.CancelledError:
            self._post(CancelRequest(request=request))
            raise
        finally:
            self._pending.pop(request, None)
            del self._clocks[request]

    def release(self, episode: int, session: str) -> None:
        self._post(ReleaseSession(episode=episode, session=session))


class _ForwardingEngine:
    """The driver's engine, for one episode."""

    policy_version = 0

    def __init__(self, player: EpisodePlayer, episode: int) -> None:
        self._player, self._episode = player, episode

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        return await self._player.generate(self._episode, token_ids, sampling, session)

    async def release(self, session: str) -> None:
        self._player.release(self._episode, session)

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class _LogForwarder(logging.Handler):
    def __init__(self, post: Callable[[FromWorker], None]) -> None:
        super().__init__(logging.WARNING)
        self._post_message = post

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # a bad format string must not end an episode
            text = record.getMessage()
            self._post_message(LogLine(logger=record.name, level=record.levelno, text=text))


def _count_from(spans: Sequence[Span], start_ns: int) -> tuple[Span, ...]:
    """Clocks of two machines differ, so spans travel relative to the start of their episode."""
    assert start_ns <= perf_counter_ns()
    return tuple(
        part._replace(start_ns=part.start_ns - start_ns, end_ns=part.end_ns - start_ns)
        for part in spans
    )
