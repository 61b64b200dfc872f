"""VllmEngine: vLLM started from this process as an Engine that can be trained."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields as fields_of
from itertools import count
from typing import Any, Protocol

from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines.request_checks import reject_logits_processors
from skyfleet.engines.sampler import ends_with_stop, validate_request
from skyfleet.engines.sampling_params import SamplingParams, request_seed
from skyfleet.engines.vllm_controller import (
    VllmController,
    VllmSettings,
    check_vllm,
    describe_error,
    engine_args,
)
from skyfleet.errors import ConfigError, EngineError, wrap_errors

_FINISH_REASONS: Mapping[str | None, Finish] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}


class OutputPart(Protocol):
    """The fields of vLLM's CompletionOutput that are used here."""

    token_ids: Sequence[int]
    logprobs: Any
    """vLLM's FlatLogprobs; None for a greedy turn, which requests none."""
    finish_reason: str | None


def vllm_fields(sampling: SamplingParams, *, session: str, position: int) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams, without stop strings, which this engine matches itself."""
    seed = sampling.seed
    # A greedy token has logprob 0; vLLM would return the logprob before the argmax.
    greedy = sampling.temperature == 0
    return {
        "max_tokens": sampling.max_generate_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "seed": None if seed is None else request_seed(seed, session, position),
        "ignore_eos": True,  # stop_token_ids lists every token that ends a turn
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": None if greedy else 0,  # of the sampled token only
        "flat_logprobs": True,
        "detokenize": False,
    }


def parse_logprobs(part: OutputPart) -> list[float]:
    """One logprob per token."""
    if part.logprobs is None:
        return [0.0] * len(part.token_ids)
    logprobs: list[float] = part.logprobs.logprobs
    # A last part without tokens carries the logprobs of all parts before it.
    return logprobs[len(logprobs) - len(part.token_ids) :]


def parse_finish(part: OutputPart) -> Finish:
    finish = _FINISH_REASONS.get(part.finish_reason)
    if finish is None:
        raise EngineError(f"vLLM ended a turn with finish_reason={part.finish_reason!r}")
    return finish


async def open_vllm_engine(
    model_path: str, settings: VllmSettings, *, decode_text: Callable[[Sequence[int]], str]
) -> VllmEngine:
    """Start vLLM with a folder or a Hugging Face name. `decode_text` is for stop strings."""
    check_vllm()
    # A fork would inherit locks of torch's threads that nothing releases.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    known = {field.name for field in fields_of(AsyncEngineArgs)}
    arguments = engine_args(model_path, settings, known)
    try:
        # Blocks the event loop, which owns the engine's sockets; nothing else runs yet.
        return VllmEngine(
            AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)),
            settings,
            decode_text=decode_text,
        )
    except Exception as error:
        raise ConfigError(
            f"generator.backend='vllm' cannot start with {model_path!r}: {describe_error(error)}"
        ) from error


class VllmEngine(VllmController):
    supports_cuda_ipc = True
    remedy = "run the same command to resume from the latest checkpoint"

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
        self._request_numbers = count()

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        validate_request(token_ids, sampling, capacity=self._capacity, session=session)
        reject_logits_processors(sampling, "vLLM in this process")
        await self._wait_ready()
        version = self.policy_version
        params = _to_vllm_params(sampling, session, len(token_ids))
        try:
            with wrap_errors(EngineError, "vLLM"):
                prompt = _to_vllm_prompt(token_ids, version)
                request_id = f"{session}#{next(self._request_numbers)}"
                # Closing aborts a turn that was cancelled.
                async with aclosing(self._llm.generate(prompt, params, request_id)) as outputs:
                    sampled, logprobs, finish = await self._collect(outputs, sampling.stop)
        except EngineError as error:
            # A failed turn fails its episode only, unless the engine is dead.
            await self._check_alive(f"{self.name} is dead: {error}", error)
            raise
        return Completion(
            token_ids=tuple(sampled),
            logprobs=tuple(logprobs),
            finish=finish,
            policy_version=version,
        )

    async def close(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown()
        self._llm = None  # otherwise it shuts down again at interpreter exit, and fails

    async def _collect(
        self, outputs: AsyncIterator[Any], stops: Sequence[str]
    ) -> tuple[list[int], list[float], Finish]:
        sampled: list[int] = []
        logprobs: list[float] = []
        async for output in outputs:
            (part,) = output.outputs
            for token, logprob in zip(part.token_ids, parse_logprobs(part), strict=True):
                sampled.append(token)
                logprobs.append(logprob)
                if stops and ends_with_stop(stops, sampled, self._decode_text):
                    return sampled, logprobs, "stop"
            if output.finished:
                return sampled, logprobs, parse_finish(part)
        raise EngineError("vLLM ended a turn without a finish reason")

    async def _is_alive(self) -> bool:
        return not self._llm.errored


def _to_vllm_prompt(token_ids: Sequence[int], version: int) -> Any:
    from vllm.inputs import tokens_input

    return tokens_input(list(token_ids), cache_salt=str(version))


def _to_vllm_params(sampling: SamplingParams, session: str, position: int) -> Any:
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSampling

    # Stop strings are matched token by token, so the output must be streamed.
    kind = RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY
    fields = vllm_fields(sampling, session=session, position=position)
    try:
        return VllmSampling(**fields, output_kind=kind)
    except Exception as error:  # a ValueError in 0.23, no longer one in 0.32
        raise ConfigError(f"generator.sampling_params: vLLM rejects them: {error}") from error
