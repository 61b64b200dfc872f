"""Rollout workers without Ray: every message is pickled, and a test can kill a worker."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from random import Random

from tests.fakes.chars import END, CharRenderer
from tests.fakes.counter_env import PRESS, CounterEnv

from skyfleet.chat.transcript import Completion
from skyfleet.cluster.episode_player import EpisodePlayer
from skyfleet.cluster.messages import FromWorker, StartEpisode, ToWorker
from skyfleet.cluster.pool_worker import WorkerLostError
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.rollouts.policy_agent import PolicyAgent
from skyfleet.tasks.task import Task


class LocalWorker:
    def __init__(self, deadly: str = "") -> None:
        """The worker dies when it gets the task `deadly`."""
        self.player = EpisodePlayer()
        self.is_killed = False
        self._deadly = deadly
        self.n_sent = 0

    def kill(self) -> None:
        """Nothing comes from it any more, as from a process that was killed."""
        self.is_killed = True
        self.player.close()

    async def send(self, messages: Sequence[ToWorker]) -> None:
        if self.is_killed:
            raise WorkerLostError("killed")
        self.n_sent += len(messages)
        self.player.send(pickle.loads(pickle.dumps(messages)))
        for message in messages:
            if isinstance(message, StartEpisode) and self._deadly == pickle.loads(message.task).key:
                self.kill()

    async def receive(self) -> list[FromWorker]:
        messages: list[FromWorker] = await asyncio.to_thread(self.player.receive, 0.02)
        if self.is_killed:
            raise WorkerLostError("killed")
        return pickle.loads(pickle.dumps(messages))  # type: ignore[no-any-return]

    async def close(self) -> None:
        if not self.is_killed:
            self.player.close()


class LocalWorkers:
    """Opens workers, and remembers them."""

    def __init__(self, deadly: str = "") -> None:
        self.opened: list[LocalWorker] = []
        self._deadly = deadly

    async def open(self) -> LocalWorker:
        self.opened.append(LocalWorker(self._deadly))
        return self.opened[-1]


class SeededEngine:
    """Presses by 1 or 2: seed, session and length of the prompt decide, as in a real engine."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        self.policy_version = 7
        self.n_running = 0
        self.sessions: list[str] = []
        self.released: list[str] = []
        self._seconds = seconds

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        self.sessions.append(session)
        self.n_running += 1
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self.n_running -= 1
        rng = Random(f"{sampling.seed} {session} {len(token_ids)}")
        text = (*map(ord, PRESS % rng.choice([1, 2])), END)
        return Completion(
            token_ids=text,
            logprobs=tuple(-rng.random() for _ in text),
            finish="stop",
            policy_version=self.policy_version,
        )

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


def seeded_agent(engine: Engine, *, seed: int = 1, session_prefix: str = "") -> PolicyAgent:
    return PolicyAgent(
        tokenizer=None,
        renderer=_RENDERER,
        engine=engine,
        sampling=SamplingParams(seed=seed),
        max_input_length=10_000,
        session_prefix=session_prefix,
    )


_RENDERER = CharRenderer()


async def open_counter(task: Task) -> CounterEnv:
    return CounterEnv()
