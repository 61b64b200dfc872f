"""What vLLM engines share: settings, pause and resume, sleep and wake, weight updates."""

from __future__ import annotations

import asyncio
import difflib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from skyfleet.engines.versions import at_least
from skyfleet.errors import ConfigError, EngineLostError, MissingExtraError, ModelError

FIRST_VLLM = "0.23"
"""The first whose weights can be replaced layer by layer while requests wait."""

WORKER_EXTENSION = "skyfleet.engines.vllm_worker.WeightDoor"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Named as in `generator`; defaults are its own."""

    max_model_len: int
    """Tokens of the longest episode, its last turn included."""
    model_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.8
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    sleep_level: Literal[0, 1, 2] = 0
    """While the learner works: 0 keeps the memory, 1 moves the weights to the host and drops the
    cache, 2 drops the weights too, which a weight sync must bring back. CUDA only."""
    seed: int = 0
    """For requests that have none of their own."""
    engine_init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Handed to vLLM as they are."""


def engine_args(model_path: str, settings: VllmSettings, known: Collection[str]) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs, whose names are `known`."""
    ours: dict[str, Any] = {
        "model": model_path,
        # Tokens in, tokens out: words are the renderer's.
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_sleep_mode": settings.sleep_level > 0,
        "disable_log_stats": True,
        "dtype": settings.model_dtype,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "seed": settings.seed,
    }
    theirs = dict(settings.engine_init_kwargs)
    if taken := sorted(ours.keys() & theirs.keys() - {"disable_log_stats"}):
        raise ConfigError(
            f"generator.engine_init_kwargs has {taken}, which other keys decide; leave them out"
        )
    if unknown := sorted(theirs.keys() - set(known)):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        raise ConfigError(f"generator.engine_init_kwargs.{unknown[0]}: vLLM has none such; {hint}")
    return ours | theirs


def check_vllm() -> None:
    """MissingExtraError without vLLM, ConfigError with one that is too old."""
    try:
        from vllm import __version__ as version
    except ImportError:
        raise MissingExtraError("vllm", "train,vllm", constrained=False) from None
    check_version(version)


def check_version(version: str) -> None:
    if not at_least(version, FIRST_VLLM):
        raise ConfigError(
            f"generator.backend='vllm' and vLLM {version} is installed; it needs {FIRST_VLLM} or "
            "newer, or start that one as a server and use generator.backend='openai'"
        )


class VllmController(ABC):
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
        self.is_lost = False
        """It has died. What comes up in its place has other weights, and is not asked in this run."""

    async def release(self, session: str) -> None:  # noqa: B027 - there is nothing to be done
        """vLLM drops the oldest of its cache by itself."""

    async def sleep(self) -> None:
        """Turns under way end first; those asked for meanwhile begin after `wake`."""
        level = self._sleep_level
        if level == 0:
            async with self._told("drop its cache"):
                await self._llm.reset_prefix_cache()
            return
        self._awake.clear()
        async with self._told("sleep"):
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
        async with self._told(method):
            answers: list[Any] = await self._llm.collective_rpc(method, args=arguments)
        return answers

    async def _ready(self) -> None:
        """Returns when a turn can begin."""
        await self._awake.wait()
        self._check_not_lost()
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
        async with self._told("pause"):
            await self._llm.pause_generation(mode="keep", clear_cache=True)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # it may be why the first failed
                await self._llm.resume_generation()
            raise
        async with self._told("resume"):
            await self._llm.resume_generation()

    async def _wake(self, *tags: str) -> None:
        if tags:
            async with self._told("wake"):
                await self._llm.wake_up(tags=list(tags))
            self._asleep = [tag for tag in self._asleep if tag not in tags]

    @asynccontextmanager
    async def _told(self, what: str) -> AsyncIterator[None]:
        """No episode's fault: ModelError, which stops the run; EngineLostError where it has died."""
        try:
            yield
        except Exception as error:
            failure = f"{self.name} was told to {what} and failed: {reason_of(error)}"
            await self._check_alive(failure, error)
            raise ModelError(f"{failure}; {self.way_out}") from error

    async def _check_alive(self, failure: str, error: Exception) -> None:
        """EngineLostError where it has died, which whatever comes up in its place does not mend."""
        if not self.is_lost and await self._is_alive():
            return
        self.is_lost = True
        self._awake.set()  # whoever waits for it is told
        raise EngineLostError(failure, self.way_out) from error

    def _check_not_lost(self) -> None:
        if self.is_lost:
            raise EngineLostError(f"{self.name} has died", self.way_out)

    @abstractmethod
    async def _is_alive(self) -> bool: ...


def reason_of(error: Exception) -> str:
    """Its first line."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
