"""SteeredVllm: a running vLLM is put to sleep, woken and given new weights, wherever it runs.

What was cached under old weights is never read again: the cache is dropped when weights arrive, and
its keys carry the policy version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Literal

from skyfleet.errors import ConfigError, ModelError


class SteeredVllm:
    """What an engine of vLLM's is besides its turns."""

    reads_memory: bool
    """Whether it can be told where weights lie in GPU memory; else they come in a file."""
    way_out: str
    """What whoever started it does when it fails."""

    def __init__(
        self, llm: Any, *, name: str, sleep_level: Literal[0, 1, 2], model_dtype: str
    ) -> None:
        """`llm` has the calls of vLLM's AsyncLLM that are made here."""
        self.name, self.model_dtype = name, model_dtype
        self._llm, self._sleep_level = llm, sleep_level
        self.policy_version = 0
        self._asleep: list[str] = []
        """Which of vLLM's memory is given back: weights, kv_cache."""
        self._awake = asyncio.Event()
        self._awake.set()
        self._has_weights = True

    async def release(self, session: str) -> None:
        """vLLM drops the oldest of its cache by itself."""

    async def sleep(self) -> None:
        """Turns under way end first; those asked for meanwhile begin after `wake`."""
        level = self._sleep_level
        if level == 0:
            with self._told("drop its cache"):
                await self._llm.reset_prefix_cache()
            return
        self._awake.clear()
        with self._told("sleep"):
            await self._llm.sleep(level=level, mode="wait")
        self._asleep, self._has_weights = ["weights", "kv_cache"], level == 1

    async def wake(self) -> None:
        """Until then `_ready` holds turns back: 0.23 schedules them as soon as weights are awake."""
        await self._wake(*self._asleep)
        self._awake.set()

    async def load(self, method: str, argument: str | bytes, *, policy_version: int) -> None:
        """New weights, by one of WeightDoor's methods. Turns under way wait, then go on with them."""
        async with self._still():
            await self.ask(method, argument)
            self._has_weights, self.policy_version = True, policy_version

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """What each worker answers."""
        with self._told(method):
            answers: list[Any] = await self._llm.collective_rpc(method, args=arguments)
        return answers

    async def _ready(self) -> None:
        """Returns when a turn can begin."""
        await self._awake.wait()
        if not self._has_weights:
            raise ConfigError(
                f"{self.name} dropped its weights to sleep, and none have come since; push them "
                "before it speaks"
            )

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Weights are in memory, nothing is cached, and nothing computes."""
        await self._wake(*[tag for tag in self._asleep if tag == "weights"])
        if not self._awake.is_set():
            yield
            return
        with self._told("pause"):
            await self._llm.pause_generation(mode="keep", clear_cache=True)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # it may be why the first failed
                await self._llm.resume_generation()
            raise
        with self._told("resume"):
            await self._llm.resume_generation()

    async def _wake(self, *tags: str) -> None:
        if tags:
            with self._told("wake"):
                await self._llm.wake_up(tags=list(tags))
            self._asleep = [tag for tag in self._asleep if tag not in tags]

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """No episode's fault: ModelError, which stops the run."""
        try:
            yield
        except Exception as error:
            raise ModelError(
                f"{self.name} was told to {what} and failed: {reason_of(error)}; if it has died, "
                f"{self.way_out}"
            ) from error


def reason_of(error: Exception) -> str:
    """Its first line."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
