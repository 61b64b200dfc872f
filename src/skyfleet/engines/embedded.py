"""EmbeddedEngine: the learner's own weights, sampled from in this process.

Every step serves all sessions at once: those that decode get their next token, those that arrived
get their prompt read, new tokens only. Nothing is copied when weights change: `policy_version`
moves and what was cached under the old weights is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from skyfleet.chat.transcript import Completion
from skyfleet.engines.kv_cache import BLOCK, CachedAttention, KeyValueCache, Row, Segment
from skyfleet.engines.sampler import check_fits, draw, finish_of, randomness_of
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.models.decoder import Decoder


@dataclass(slots=True)
class _Request:
    session: str
    token_ids: list[int]
    """The prompt, then what was sampled."""
    sampling: SamplingParams
    future: asyncio.Future[Completion]
    n_prompt: int
    policy_version: int
    """When it began: weights may arrive while it runs, and the oldest decides how stale it is."""
    randomness: np.random.Generator
    row: Row | None = None
    logprobs: list[float] = field(default_factory=list)

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
    ) -> None:
        self._decoder = decoder
        self._decode_text = decode_text
        """For stop strings, which are matched in text."""
        self._cache = KeyValueCache(decoder, rows=max_num_seqs, capacity=capacity)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._rows: dict[str, Row] = {}
        """Session -> its cache row, in order of last use."""
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._worker: asyncio.Task[None] | None = None
        self._policy_version = 0
        self.tokens_computed = 0
        """Tokens the network has read or decoded so far: what prefix sharing saves shows here."""

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if version != self._policy_version:
            self._drop_cache()
        self._policy_version = version

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        check_fits(
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
            randomness=randomness_of(sampling.seed, session, len(token_ids)),
        )
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def release(self, session: str) -> None:
        if row := self._rows.pop(session, None):
            self._cache.give_back(row)

    async def sleep(self) -> None:
        self._drop_cache()

    async def wake(self) -> None: ...

    async def _work(self) -> None:
        """Step until nobody waits. An error here is the run's, so every waiting episode raises it."""
        try:
            while self._waiting or self._running:
                self._step()
                await asyncio.sleep(0)  # episodes take their tokens, step their worlds, come back
        except BaseException as error:
            for request in (*self._waiting, *self._running):
                if not request.future.done():
                    request.future.set_exception(error)
            self._waiting, self._running = [], []
            if not isinstance(error, Exception):
                raise

    @torch.inference_mode()
    def _step(self) -> None:
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
        last, speaking = -1, []
        for request, segment in batch:
            last += segment.length
            assert request.row is not None
            stop = segment.start + segment.length
            self._cache.extend(request.row, request.token_ids[segment.start : stop])
            if stop == len(request.token_ids):
                speaking.append((request, last))
        if speaking:
            rows = torch.tensor([row for _, row in speaking], device=hidden_TE.device)
            self._speak([request for request, _ in speaking], hidden_TE[rows])

    def _admit(self) -> None:
        """Give waiting requests a cache row each, as long as there are rows."""
        still_waiting: list[_Request] = []
        reading = (r for r in self._running if self._waiting and _reads(r))
        being_read = {_beginning(request) for request in reading}
        for request in self._waiting:
            # A sibling of a prompt that is being read waits until it can borrow it.
            must_wait = request.session not in self._rows and _beginning(request) in being_read
            request.row = None if must_wait else self._row_for(request)
            if request.row is None:
                still_waiting.append(request)
                continue
            self._running.append(request)
            if _reads(request):
                being_read.add(_beginning(request))
        self._waiting = still_waiting

    def _row_for(self, request: _Request) -> Row | None:
        row = self._rows.pop(request.session, None)
        if row is None:
            row = self._cache.take() or self._evict()
            if row is None:
                return None
            self._cache.borrow(row, request.token_ids)
        self._cache.trim(row, request.token_ids)
        self._rows[request.session] = row
        return row

    def _evict(self) -> Row | None:
        """Take the row of the session that has been idle longest."""
        busy = {r.session for r in self._running}
        for session in self._rows:
            if session not in busy:
                self._cache.give_back(self._rows.pop(session))
                return self._cache.take()
        return None

    def _next_batch(self) -> list[tuple[_Request, Segment]]:
        """What each running request has not computed yet, within the token budget; singles first."""
        single: list[tuple[_Request, Segment]] = []
        longer: list[tuple[_Request, Segment]] = []
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

    def _speak(self, requests: Sequence[_Request], hidden_NE: torch.Tensor) -> None:
        logits_NV = self._decoder.logits(hidden_NE)
        by_params: dict[SamplingParams, list[int]] = {}
        for index, request in enumerate(requests):
            by_params.setdefault(request.sampling, []).append(index)
        for sampling, indices in by_params.items():
            uniforms = [requests[i].randomness.random() for i in indices]
            uniforms_N = torch.tensor(uniforms, dtype=torch.float64, device=logits_NV.device)
            chosen_NV = logits_NV if len(indices) == len(requests) else logits_NV[indices]
            tokens_N, logprobs_N = draw(chosen_NV, sampling, uniforms_N)
            for index, token, logprob in zip(
                indices, tokens_N.tolist(), logprobs_N.tolist(), strict=True
            ):
                self._say(requests[index], token, logprob)

    def _say(self, request: _Request, token: int, logprob: float) -> None:
        request.token_ids.append(token)
        request.logprobs.append(logprob)
        finish = finish_of(request.sampling, request.sampled, self._decode_text)
        if finish is None:
            return
        self._running.remove(request)
        request.future.set_result(
            Completion(
                token_ids=tuple(request.sampled),
                logprobs=tuple(request.logprobs),
                finish=finish,
                policy_version=request.policy_version,
            )
        )

    def _drop_cache(self) -> None:
        """Requests that run go on after they have been read again."""
        self._waiting, self._running = self._running + self._waiting, []
        for row in self._rows.values():
            self._cache.give_back(row)
        self._rows = {}
        self._cache.forget_all()


def _beginning(request: _Request) -> tuple[int, ...]:
    return tuple(request.token_ids[:-1])


def _reads(request: _Request) -> bool:
    """Whether enough of its prompt is still to be computed that a sibling would gain by waiting."""
    assert request.row is not None
    return len(request.token_ids) - len(request.row.token_ids) > BLOCK
