"""EmbeddedEngine: continuous batching on a CPU, usually over the learner's own weights.

Every step serves all sessions at once: running sequences decode their next token, and new requests
prefill the tokens that are not cached. A new `policy_version` drops the KV cache, or with
`keeps_cache` only what new sessions could have shared of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import thread_time

import numpy as np
import torch

from skyfleet.chat.transcript import Completion
from skyfleet.engines.kv_cache import CachedAttention, KVCache, Row, Segment
from skyfleet.engines.prefix_cache import BLOCK_SIZE
from skyfleet.engines.sampler import detect_finish, make_rng, sample_tokens, validate_request
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.models.decoder import Decoder
from skyfleet.models.heap import return_free_heap
from skyfleet.models.out_of_memory import explain_out_of_memory

MEMORY_REMEDY = "lower generator.max_num_seqs, max_num_batched_tokens or max_input_length"


@dataclass(slots=True)
class _Request:
    session: str
    token_ids: list[int]
    """The prompt, followed by the sampled tokens."""
    sampling: SamplingParams
    future: asyncio.Future[Completion]
    n_prompt: int
    policy_version: int
    """The version that sampled the first token."""
    rng: np.random.Generator
    row: Row | None = None
    logprobs: list[float] = field(default_factory=list)
    version_changes: list[tuple[int, int]] = field(default_factory=list)

    def note_version(self, version: int) -> None:
        """`version` samples the next token."""
        newest = self.version_changes[-1][1] if self.version_changes else self.policy_version
        if not self.logprobs:
            self.policy_version = version
        elif version != newest:
            self.version_changes.append((len(self.logprobs), version))

    @property
    def sampled(self) -> list[int]:
        return self.token_ids[self.n_prompt :]


class EmbeddedEngine:
    def __init__(
        self,
        decoder: Decoder,
        *,
        decode_text: Callable[[Sequence[int]], str],
        max_num_seqs: int,
        capacity: int,
        max_num_batched_tokens: int = 8192,
        memory_plan: str = "",
        keeps_cache: bool = False,
    ) -> None:
        """`memory_plan` describes the memory that was planned, for an error message.

        `keeps_cache`: sessions that are open when new weights arrive keep their KV cache.
        """
        self._keeps_cache = keeps_cache
        self._decoder = decoder
        self._decode_text = decode_text
        """For stop strings, which are matched in text."""
        self._cache = KVCache(decoder, rows=max_num_seqs, capacity=capacity)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._memory_plan = memory_plan
        self._rows: dict[str, Row] = {}
        """Session -> its cache row, least recently used first."""
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._worker: asyncio.Task[None] | None = None
        self._policy_version = 0
        self.tokens_computed = 0
        """Tokens prefilled or decoded so far; shows what prefix caching saves."""
        self.compute_seconds = 0.0
        """Time of the event loop's thread on a processor that this engine took so far."""

    @property
    def decoder(self) -> Decoder:
        """The model that this engine samples from."""
        return self._decoder

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if version != self._policy_version:
            if self._keeps_cache:
                self._cache.stop_sharing()
            else:
                self._drop_cache()
        self._policy_version = version

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        validate_request(
            token_ids,
            sampling,
            capacity=self._cache.capacity,
            session=session,
            vocab_size=self._decoder.vocab_size,
        )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = _Request(
            session=session,
            token_ids=list(token_ids),
            sampling=sampling,
            future=future,
            n_prompt=len(token_ids),
            policy_version=self._policy_version,
            rng=make_rng(sampling.seed, session, len(token_ids)),
        )
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def release(self, session: str) -> None:
        if row := self._rows.pop(session, None):
            self._cache.release(row)

    async def sleep(self) -> None:
        """Return the memory of the KV cache while the learner works; it grows again on demand."""
        self._drop_cache()
        self._cache.free_memory()

    async def wake(self) -> None:
        """The cache can have the memory that an update freed."""
        return_free_heap()

    async def _work(self) -> None:
        """Step until no request is left. An error fails every pending request."""
        try:
            while self._waiting or self._running:
                start = thread_time()
                with explain_out_of_memory("the engine", MEMORY_REMEDY, self._memory_plan):
                    self._step()
                self.compute_seconds += thread_time() - start
                await asyncio.sleep(0)  # let episodes process their turns and send new requests
        except BaseException as error:
            for request in (*self._waiting, *self._running):
                if not request.future.done():
                    request.future.set_exception(error)
            self._waiting, self._running = [], []
            if not isinstance(error, Exception):
                raise

    @torch.inference_mode()
    def _step(self) -> None:
        """One forward pass: prefill new prompts and decode one token of each running sequence."""
        self._running = [r for r in self._running if not r.future.done()]
        self._waiting = [r for r in self._waiting if not r.future.done()]
        self._admit()
        batch = self._next_batch()
        if not batch:
            return
        segments = [segment for _, segment in batch]
        token_ids = [
            t
            for request, segment in batch
            for t in request.token_ids[segment.start : segment.start + segment.length]
        ]
        attend = CachedAttention(self._cache, segments)
        token_ids_T = torch.tensor(token_ids, device=self._decoder.device)
        hidden_TE = self._decoder.hidden(token_ids_T, attend.positions_T, attend)
        self.tokens_computed += len(token_ids)
        last, completed = -1, []
        for request, segment in batch:
            last += segment.length
            assert request.row is not None
            stop = segment.start + segment.length
            self._cache.extend(request.row, request.token_ids[segment.start : stop])
            # A prompt that exceeds the token budget is prefilled over several steps.
            if stop == len(request.token_ids):
                completed.append((request, last))
        if completed:
            rows = torch.tensor([row for _, row in completed], device=hidden_TE.device)
            self._sample([request for request, _ in completed], hidden_TE[rows])

    def _admit(self) -> None:
        """Give each waiting request a cache row while there are any."""
        still_waiting: list[_Request] = []
        in_prefill = (r for r in self._running if self._waiting and _is_prefilling(r))
        prefilling = {_prefix(request) for request in in_prefill}
        for request in self._waiting:
            # While its prompt is being prefilled for another request, it waits to copy the cache.
            must_wait = request.session not in self._rows and _prefix(request) in prefilling
            request.row = None if must_wait else self._assign_row(request)
            if request.row is None:
                still_waiting.append(request)
                continue
            self._running.append(request)
            if _is_prefilling(request):
                prefilling.add(_prefix(request))
        self._waiting = still_waiting

    def _assign_row(self, request: _Request) -> Row | None:
        row = self._rows.pop(request.session, None)
        if row is None:
            row = self._cache.allocate() or self._evict()
            if row is None:
                return None
            self._cache.copy_cached_prefix(row, request.token_ids)
        self._cache.keep_prefix(row, request.token_ids)
        self._rows[request.session] = row
        return row

    def _evict(self) -> Row | None:
        """Take the row of the least recently used idle session."""
        busy = {r.session for r in self._running}
        for session in self._rows:
            if session not in busy:
                self._cache.release(self._rows.pop(session))
                return self._cache.allocate()
        return None

    def _next_batch(self) -> list[tuple[_Request, Segment]]:
        """The tokens to compute per running request.

        The token budget is spent in the order of the running requests, on prefill and decode alike.
        The returned list is sorted: single tokens by cache row first, then longer segments, as
        `CachedAttention` needs them.
        """
        single: list[tuple[_Request, Segment]] = []  # decode
        longer: list[tuple[_Request, Segment]] = []  # prefill
        budget = self._max_num_batched_tokens
        for request in self._running:
            assert request.row is not None
            start = len(request.row.token_ids)
            length = min(len(request.token_ids) - start, budget)
            if length:
                segment = Segment(row=request.row.index, start=start, length=length)
                (single if length == 1 else longer).append((request, segment))
                budget -= length
        return sorted(single, key=lambda pair: pair[1].row) + longer

    def _sample(self, requests: Sequence[_Request], hidden_NE: torch.Tensor) -> None:
        logits_NV = self._decoder.logits(hidden_NE)
        by_params: dict[SamplingParams, list[int]] = {}
        for index, request in enumerate(requests):
            by_params.setdefault(request.sampling, []).append(index)
        for sampling, indices in by_params.items():
            uniforms = [requests[i].rng.random() for i in indices]
            uniforms_N = torch.tensor(uniforms, dtype=torch.float64, device=logits_NV.device)
            own_NV = logits_NV if len(indices) == len(requests) else logits_NV[indices]
            for process in sampling.logits_processors:
                processed = [
                    process(requests[index].token_ids, own_NV[row])
                    for row, index in enumerate(indices)
                ]
                own_NV = torch.stack(processed)
            tokens_N, logprobs_N = sample_tokens(own_NV, sampling, uniforms_N)
            for index, token, logprob in zip(
                indices, tokens_N.tolist(), logprobs_N.tolist(), strict=True
            ):
                self._append(requests[index], token, logprob)

    def _append(self, request: _Request, token: int, logprob: float) -> None:
        """Append a sampled token, and complete the request if the turn ended."""
        request.note_version(self._policy_version)
        request.token_ids.append(token)
        request.logprobs.append(logprob)
        finish = detect_finish(request.sampling, request.sampled, self._decode_text)
        if finish is None:
            return
        self._running.remove(request)
        request.future.set_result(
            Completion(
                token_ids=tuple(request.sampled),
                logprobs=tuple(request.logprobs),
                finish=finish,
                policy_version=request.policy_version,
                version_changes=tuple(request.version_changes),
            )
        )

    def _drop_cache(self) -> None:
        """Drop all KV content. Running requests continue after a new prefill."""
        self._waiting, self._running = self._running + self._waiting, []
        for row in self._rows.values():
            self._cache.release(row)
        self._rows = {}
        self._cache.reset_prefix_cache()


def _prefix(request: _Request) -> tuple[int, ...]:
    return tuple(request.token_ids[:-1])


def _is_prefilling(request: _Request) -> bool:
    """Whether so much of the prompt is left to compute that others gain by waiting for it."""
    assert request.row is not None
    return len(request.token_ids) - len(request.row.token_ids) > BLOCK_SIZE
