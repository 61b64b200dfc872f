"""vLLM in this process as an Engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields as fields_of
from itertools import count
from typing import Any, Protocol

from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines.sampler import check_fits, said_stop
from skyfleet.engines.sampling_params import SamplingParams, request_seed
from skyfleet.engines.vllm_controller import (
    VllmController,
    VllmSettings,
    check_vllm,
    engine_args,
    reason_of,
)
from skyfleet.errors import ConfigError, EngineError, wrap_errors

_FINISHES: Mapping[str | None, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


class Part(Protocol):
    """vLLM's CompletionOutput, as far as it is read."""

    token_ids: Sequence[int]
    logprobs: Any
    """vLLM's FlatLogprobs; None for a greedy turn, which has not asked for any."""
    finish_reason: str | None


def vllm_fields(sampling: SamplingParams, *, session: str, position: int) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams. Stop strings are not among them: the engine reads them."""
    seed = sampling.seed
    # The likeliest token is taken with certainty; vLLM would tell how likely it was.
    greedy = sampling.temperature == 0
    return {
        "max_tokens": sampling.max_generate_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "seed": None if seed is None else request_seed(seed, session, position),
        "ignore_eos": True,  # what ends a turn stands in stop_token_ids
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": None if greedy else 0,  # the chosen token's alone
        "flat_logprobs": True,
        "detokenize": False,
    }


def logprobs_of(part: Part) -> list[float]:
    """One a token."""
    if part.logprobs is None:
        return [0.0] * len(part.token_ids)
    logprobs: list[float] = part.logprobs.logprobs
    # With a last part that has no tokens come the logprobs of all the parts before it.
    return logprobs[len(logprobs) - len(part.token_ids) :]


def vllm_finish(part: Part) -> Finish:
    finish = _FINISHES.get(part.finish_reason)
    if finish is None:
        raise EngineError(f"vLLM ended a turn with finish_reason={part.finish_reason!r}")
    return finish


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
            f"generator.backend='vllm' cannot start with {model_path!r}: {reason_of(error)}"
        ) from error


class VllmEngine(VllmController):
    reads_memory = True
    way_out = "the same command goes on from the newest checkpoint"

    def __init__(
        self, llm: Any, settings: VllmSettings, *, decode_text: Callable[[Sequence[int]], str]
    ) -> None:
        super().__init__(
            llm,
            name="vLLM",
            sleep_level=settings.sleep_level,
            model_dtype=settings.model_dtype,
        )
        self._decode_text, self._capacity = decode_text, settings.max_model_len
        self._numbers = count()

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        check_fits(token_ids, sampling, capacity=self._capacity, session=session)
        await self._ready()
        version = self.policy_version
        asked = _asked(sampling, session, len(token_ids))
        try:
            with wrap_errors(EngineError, "vLLM"):
                prompt = _prompt(token_ids, version)
                request_id = f"{session}#{next(self._numbers)}"
                # Closed in any case: a turn that nobody waits for is aborted.
                async with aclosing(self._llm.generate(prompt, asked, request_id)) as outputs:
                    sampled, logprobs, finish = await self._heard(outputs, sampling.stop)
        except EngineError as error:
            # A turn that fails is its episode's matter, unless all that follow would fail with it.
            await self._check_alive(f"{self.name} has died: {error}", error)
            raise
        return Completion(
            token_ids=tuple(sampled),
            logprobs=tuple(logprobs),
            finish=finish,
            policy_version=version,
        )

    async def close(self) -> None:
        """Ends vLLM's processes."""
        self._llm.shutdown()
        self._llm = None  # kept until Python ends, it would shut down again and fail at that

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

    async def _is_alive(self) -> bool:
        return not self._llm.errored


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
