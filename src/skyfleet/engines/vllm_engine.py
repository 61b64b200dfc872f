"""VllmEngine: vLLM as the Engine, its scheduler and workers in processes of their own.

Tokens go in and come out; vLLM never sees a word. What was cached under old weights is never read
again: the cache is dropped when weights arrive, and its keys carry the policy version.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import fields as fields_of
from itertools import count
from typing import Any

from skyfleet.chat.completion import Completion, Finish
from skyfleet.engines.fitting import check_fits
from skyfleet.engines.sampling import SamplingParams
from skyfleet.engines.stopping import said_stop
from skyfleet.engines.vllm_requests import logprobs_of, vllm_fields, vllm_finish
from skyfleet.engines.vllm_settings import VllmSettings, check_vllm, engine_args
from skyfleet.errors import ConfigError, EngineError, ModelError, blamed_on


async def open_vllm_engine(
    model_path: str, settings: VllmSettings, *, decode_text: Callable[[Sequence[int]], str]
) -> VllmEngine:
    """A folder or a Hugging Face name, loaded. `decode_text` is for stop strings."""
    check_vllm()
    # A fork would inherit torch's threads as locks that nobody opens.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    known = {field.name for field in fields_of(AsyncEngineArgs)}
    arguments = engine_args(model_path, settings, known)
    try:
        # On the event loop, which the engine's sockets belong to; nothing else runs yet.
        return VllmEngine(
            AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)),
            settings,
            decode_text=decode_text,
        )
    except Exception as error:
        raise ConfigError(
            f"generator.backend='vllm' cannot start with {model_path!r}: {_reason(error)}"
        ) from error


class VllmEngine:
    def __init__(
        self, llm: Any, settings: VllmSettings, *, decode_text: Callable[[Sequence[int]], str]
    ) -> None:
        self._llm, self._decode_text = llm, decode_text
        self.settings = settings
        self.policy_version = 0
        self._numbers = count()
        self._asleep: list[str] = []
        """Which of vLLM's memory is given back: weights, kv_cache."""
        self._awake = asyncio.Event()
        self._awake.set()
        self._has_weights = True

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        check_fits(token_ids, sampling, capacity=self.settings.max_model_len, session=session)
        await self._awake.wait()
        if not self._has_weights:
            raise ConfigError(
                "sleep_level=2 dropped the engine's weights and none have come since; "
                "sync them after wake(), or use sleep_level=1"
            )
        version = self.policy_version
        asked = _asked(sampling, session, len(token_ids))
        with self._while_alive(), blamed_on(EngineError, "vLLM"):
            prompt = _prompt(token_ids, version)
            request_id = f"{session}#{next(self._numbers)}"
            # Closed in any case: a turn that nobody waits for is aborted.
            async with aclosing(self._llm.generate(prompt, asked, request_id)) as outputs:
                sampled, logprobs, finish = await self._heard(outputs, sampling.stop)
        return Completion(
            token_ids=tuple(sampled),
            logprobs=tuple(logprobs),
            finish=finish,
            policy_version=version,
        )

    async def release(self, session: str) -> None:
        """vLLM drops the oldest of its cache by itself."""

    async def sleep(self) -> None:
        """Turns under way end first; those asked for meanwhile begin after `wake`."""
        level = self.settings.sleep_level
        if level == 0:
            with _told("drop its cache"):
                await self._llm.reset_prefix_cache()
            return
        self._awake.clear()
        with _told("sleep"):
            await self._llm.sleep(level=level, mode="wait")
        self._asleep, self._has_weights = ["weights", "kv_cache"], level == 1

    async def wake(self) -> None:
        await self._wake(*self._asleep)
        self._awake.set()

    async def close(self) -> None:
        """Ends vLLM's processes."""
        self._llm.shutdown()
        self._llm = None  # kept until Python ends, it would shut down again and fail at that

    async def load(self, method: str, argument: str | bytes, *, policy_version: int) -> None:
        """New weights, by one of WeightDoor's methods. Turns under way wait, then go on with them."""
        async with self._still():
            await self.ask(method, argument)
            self._has_weights, self.policy_version = True, policy_version

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """What each worker answers."""
        with _told(method):
            answers: list[Any] = await self._llm.collective_rpc(method, args=arguments)
        return answers

    async def _heard(
        self, outputs: AsyncIterator[Any], stops: Sequence[str]
    ) -> tuple[list[int], list[float], Finish]:
        sampled: list[int] = []
        logprobs: list[float] = []
        async for output in outputs:
            (part,) = output.outputs
            for token, logprob in zip(part.token_ids, logprobs_of(part), strict=True):
                sampled.append(token)
                logprobs.append(logprob)
                if stops and said_stop(stops, sampled, self._decode_text):
                    return sampled, logprobs, "stop"
            if output.finished:
                return sampled, logprobs, vllm_finish(part)
        raise EngineError("a turn ended without a reason")

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Weights are in memory, nothing is cached, and nothing computes."""
        await self._wake(*[tag for tag in self._asleep if tag == "weights"])
        if not self._awake.is_set():
            yield
            return
        with _told("pause"):
            await self._llm.pause_generation(mode="keep", clear_cache=True)
        try:
            yield
        finally:
            with _told("resume"):
                await self._llm.resume_generation()

    async def _wake(self, *tags: str) -> None:
        if tags:
            with _told("wake"):
                await self._llm.wake_up(tags=list(tags))
            self._asleep = [tag for tag in self._asleep if tag not in tags]

    @contextmanager
    def _while_alive(self) -> Iterator[None]:
        """A turn that fails is its episode's matter, unless all that follow would fail with it."""
        try:
            yield
        except EngineError as error:
            if self._llm.errored:
                raise ModelError(
                    f"vLLM has died: {error}; its own last lines say why, and the same "
                    "command goes on from the newest checkpoint"
                ) from error
            raise


@contextmanager
def _told(what: str) -> Iterator[None]:
    """No episode's fault: ModelError, which stops the run."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"vLLM was told to {what} and failed: {_reason(error)}") from error


def _prompt(token_ids: Sequence[int], version: int) -> Any:
    from vllm.inputs import tokens_input

    return tokens_input(list(token_ids), cache_salt=str(version))


def _asked(sampling: SamplingParams, session: str, position: int) -> Any:
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSampling

    # Stop strings are looked for token by token, so the tokens must come one by one.
    kind = RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY
    fields = vllm_fields(sampling, session=session, position=position)
    try:
        return VllmSampling(**fields, output_kind=kind)
    except Exception as error:  # a ValueError in 0.23, no longer one in 0.32
        raise ConfigError(f"generator.sampling_params: vLLM refuses them: {error}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
