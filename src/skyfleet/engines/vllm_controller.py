"""VllmController: what vLLM in this process and vLLM servers share.

Engine arguments, pause and resume, sleep and wake, weight updates, and detection of a dead engine.
"""

from __future__ import annotations

import asyncio
import difflib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from skyfleet.engines.vllm_versions import MIN_TRAINABLE_VLLM, is_at_least
from skyfleet.errors import ConfigError, EngineLostError, MissingExtraError, ModelError

WORKER_EXTENSION = "skyfleet.engines.vllm_worker.WeightUpdateExtension"
"""vLLM loads this class by its dotted name (--worker-extension-cls)."""
LOGPROBS_MODE = "processed_logprobs"
"""Logprobs after temperature and truncation: those of the distribution that tokens are sampled
from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of an in-process vLLM, with the names and defaults of the `generator` section."""

    max_model_len: int
    """Tokens of the longest episode, including its last turn."""
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
    cache, 2 drops the weights too, so that a weight sync must follow. CUDA only."""
    seed: int = 0
    """For requests without a seed."""
    trust_remote_code: bool = False
    engine_init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to vLLM unchanged."""


def engine_args(model_path: str, settings: VllmSettings, known: Collection[str]) -> dict[str, Any]:
    """Build the arguments of vLLM's AsyncEngineArgs; `known` are the names it accepts."""
    ours: dict[str, Any] = {
        "model": model_path,
        # Tokens in, tokens out: the renderer handles text.
        "skip_tokenizer_init": True,
        "logprobs_mode": LOGPROBS_MODE,
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
        "trust_remote_code": settings.trust_remote_code,
    }
    extra = dict(settings.engine_init_kwargs)
    if conflicts := sorted(ours.keys() & extra.keys() - {"disable_log_stats"}):
        raise ConfigError(
            f"generator.engine_init_kwargs has {conflicts}, which other keys set; remove them"
        )
    if unknown := sorted(extra.keys() - set(known)):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else "remove it"
        raise ConfigError(
            f"generator.engine_init_kwargs.{unknown[0]} is not an argument of vLLM; {hint}"
        )
    return ours | extra


def check_vllm() -> None:
    """MissingExtraError without vLLM, ConfigError if its version is too old."""
    try:
        from vllm import __version__ as version
    except ImportError:
        raise MissingExtraError("vllm", "train,vllm", constrained=False) from None
    check_version(version)


def check_version(version: str) -> None:
    if not is_at_least(version, MIN_TRAINABLE_VLLM):
        raise ConfigError(
            f"generator.backend='vllm' needs vLLM {MIN_TRAINABLE_VLLM} or newer, but {version} is "
            "installed; upgrade it, or start it as a server and use generator.backend='openai'"
        )


class VllmController(ABC):
    """Controls a vLLM: sleep, wake, weight updates and liveness. Subclasses generate turns."""

    supports_cuda_ipc: bool
    """Whether it can read weights from the learner's GPU memory; otherwise from a file."""
    remedy: str
    """What the user should do when it fails, for error messages."""

    def __init__(
        self, llm: Any, *, name: str, sleep_level: Literal[0, 1, 2], model_dtype: str
    ) -> None:
        """`llm` is vLLM's AsyncLLM, or an object with the same control methods."""
        self.name, self.model_dtype = name, model_dtype
        self._llm, self._sleep_level = llm, sleep_level
        self.policy_version = 0
        self._asleep: list[str] = []
        """Tags of vLLM's memory that is freed: weights, kv_cache."""
        self._awake = asyncio.Event()
        self._awake.set()
        self._has_weights = True
        self.is_dead = False
        """A process that restarts in its place has other weights, so it is not used again in this
        run."""

    async def release(self, session: str) -> None:  # noqa: B027 - nothing to do
        """Nothing to do: vLLM evicts its cache by itself."""

    async def sleep(self) -> None:
        """Running turns end first; new ones start after `wake`."""
        level = self._sleep_level
        if level == 0:
            async with self._guarded("drop its cache"):
                await self._llm.reset_prefix_cache()
            return
        self._awake.clear()
        async with self._guarded("sleep"):
            await self._llm.sleep(level=level, mode="wait")
        self._asleep, self._has_weights = ["weights", "kv_cache"], level == 1

    async def wake(self) -> None:
        """Until then `_wait_ready` holds turns back: 0.23 schedules them once the weights are
        awake."""
        await self._wake(*self._asleep)
        self._awake.set()

    async def update_weights(
        self, method: str, argument: str | bytes, *, policy_version: int
    ) -> None:
        """Load weights by a method of WeightUpdateExtension.

        Running turns wait, then use the new weights.
        """
        async with self._paused():
            await self.collective_rpc(method, argument)
            self._has_weights, self.policy_version = True, policy_version

    async def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every worker; return one result per worker."""
        async with self._guarded(f"run {method}"):
            results: list[Any] = await self._llm.collective_rpc(method, args=arguments)
        return results

    async def _wait_ready(self) -> None:
        """Return when a turn can start."""
        await self._awake.wait()
        self._check_not_dead()
        if not self._has_weights:
            raise ConfigError(
                f"{self.name} dropped its weights at sleep level 2 and received none since; push "
                "weights before it generates"
            )

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Inside the context, weights are in memory, the cache is empty and nothing is computed."""
        await self._wake(*[tag for tag in self._asleep if tag == "weights"])
        if not self._awake.is_set():
            yield
            return
        async with self._guarded("pause"):
            await self._llm.pause_generation(mode="keep", clear_cache=True)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # it may fail for the same reason
                await self._llm.resume_generation()
            raise
        async with self._guarded("resume"):
            await self._llm.resume_generation()

    async def _wake(self, *tags: str) -> None:
        if tags:
            async with self._guarded("wake"):
                await self._llm.wake_up(tags=list(tags))
            self._asleep = [tag for tag in self._asleep if tag not in tags]

    @asynccontextmanager
    async def _guarded(self, operation: str) -> AsyncIterator[None]:
        """Turn a failure into ModelError, which stops the run, or EngineLostError if the engine is
        dead."""
        try:
            yield
        except Exception as error:
            failure = f"{self.name} failed to {operation}: {describe_error(error)}"
            await self._check_alive(failure, error)
            raise ModelError(f"{failure}; {self.remedy}") from error

    async def _check_alive(self, failure: str, error: Exception) -> None:
        """Detect a dead engine: mark it and raise EngineLostError."""
        if not self.is_dead and await self._is_alive():
            return
        self.is_dead = True
        self._awake.set()  # requests that wait for it fail instead of hanging
        raise EngineLostError(failure, self.remedy) from error

    def _check_not_dead(self) -> None:
        if self.is_dead:
            raise EngineLostError(f"{self.name} is dead", self.remedy)

    @abstractmethod
    async def _is_alive(self) -> bool: ...


def describe_error(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
