"""CudaEngine: continuous batching on one GPU, usually over the learner's own weights.

A round queues prefill passes (`prefill.py`) and decoding steps (`decode.py`) that the host-side
scheduler (`scheduler.py`) picked, then collects the sampled tokens. A new `policy_version` drops the
prefix cache, or with `keeps_cache` only hides it from new sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines.cuda.block_pool import n_blocks_for, pool_size
from skyfleet.engines.cuda.cuda_graphs import CudaGraphRecorder, copy_to_device
from skyfleet.engines.cuda.decode import MAX_STEPS, MAX_STOP_TOKENS, DecodeSlots
from skyfleet.engines.cuda.prefill import Prefill
from skyfleet.engines.cuda.scheduler import Request, Scheduler
from skyfleet.engines.prefix_cache import BLOCK_SIZE, hash_blocks
from skyfleet.engines.request_checks import reject_logits_processors
from skyfleet.engines.sampler import (
    detect_finish,
    ends_with_stop,
    stop_window,
    validate_request,
)
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError
from skyfleet.models.decoder import Decoder
from skyfleet.models.out_of_memory import explain_out_of_memory

_MAX_PREFILLS_PER_ROUND = 4
"""Prefill passes that are queued before the host looks at new requests."""
_MEMORY_REMEDY = "lower generator.max_num_batched_tokens or gpu_memory_utilization"


class CudaEngine:
    def __init__(
        self,
        decoder: Decoder,
        *,
        decode_text: Callable[[Sequence[int]], str],
        max_num_seqs: int,
        capacity: int,
        max_num_batched_tokens: int = 8192,
        memory_bytes: int | None = None,
        steps_per_round: int = 16,
        memory_plan: str = "",
        keeps_cache: bool = False,
    ) -> None:
        """`capacity` is the maximum length of a sequence; `memory_bytes` limits the KV cache.
        `keeps_cache`: sessions that are open when new weights arrive keep their KV cache.

        More decoding steps per round need fewer host synchronisations, but compute more tokens
        after a turn has ended. On an H200, 16 steps train as fast as 8, and are some 10 % faster in
        512 episodes and in a GRPO step of 512 answers.
        """
        self._decoder, self._decode_text = decoder, decode_text
        self._capacity, self._memory_plan = capacity, memory_plan
        self._steps_per_round = min(steps_per_round, MAX_STEPS)
        width = decoder.n_layers * 2 * decoder.n_kv_heads * decoder.head_dim
        n_blocks = pool_size(max_num_seqs * capacity, width * decoder.dtype.itemsize, memory_bytes)
        shape = (decoder.n_layers, n_blocks, BLOCK_SIZE, decoder.n_kv_heads, decoder.head_dim)
        keys = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        values, recorder = torch.zeros_like(keys), CudaGraphRecorder()
        self._slots = DecodeSlots(
            decoder,
            keys=keys,
            values=values,
            recorder=recorder,
            n_slots=max_num_seqs,
            capacity=capacity,
            block_size=BLOCK_SIZE,
        )
        self._scheduler = Scheduler(
            n_slots=max_num_seqs,
            n_blocks=n_blocks,
            table_width=self._slots.block_table.shape[1],
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self._prefill = Prefill(
            decoder,
            keys=keys,
            values=values,
            recorder=recorder,
            n_slots=max_num_seqs,
            # May exceed the pool: a shared block counts once per sequence.
            n_blocks=self._slots.block_table.numel(),
            max_tokens=max_num_batched_tokens,
        )
        self._worker: asyncio.Task[None] | None = None
        self._policy_version = self._round_version = 0
        self._keeps_cache = keeps_cache
        self._salts: dict[str, int] = {}
        """Open session -> the version at its start, with `keeps_cache`."""
        self._cache_is_stale = False
        """The KV cache holds content that was computed with other weights."""
        self.tokens_computed = 0
        """Tokens prefilled or decoded so far; shows what prefix caching saves."""

    @property
    def decoder(self) -> Decoder:
        """The model that this engine samples from."""
        return self._decoder

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._cache_is_stale |= version != self._policy_version and not self._keeps_cache
        self._policy_version = version

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        self._validate(token_ids, sampling, session)
        salt = self._salts.setdefault(session, self._policy_version) if self._keeps_cache else 0
        request = Request(
            session=session,
            token_ids=list(token_ids),
            sampling=sampling,
            future=asyncio.get_running_loop().create_future(),
            n_prompt=len(token_ids),
            policy_version=self._policy_version,
            block_hashes=hash_blocks(token_ids, salt=salt),
            salt=salt,
        )
        self._scheduler.waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await request.future

    async def release(self, session: str) -> None:
        """Cached blocks are evicted when others need them."""
        self._salts.pop(session, None)

    async def sleep(self) -> None:
        self._cache_is_stale = True

    async def wake(self) -> None: ...

    def _validate(self, token_ids: Sequence[int], sampling: SamplingParams, session: str) -> None:
        limits = {"capacity": self._capacity, "vocab_size": self._decoder.vocab_size}
        validate_request(token_ids, sampling, session=session, **limits)
        reject_logits_processors(sampling, "the CUDA engine")
        longest = min(self._capacity, len(token_ids) + sampling.max_generate_length + 1)
        if n_blocks_for(longest) > self._scheduler.n_blocks:
            raise EngineError(
                f"session {session}: {longest} tokens do not fit in the engine's memory; lower "
                "generator.max_input_length or raise generator.gpu_memory_utilization"
            )
        if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
            raise EngineError(
                f"{len(sampling.stop_token_ids)} stop tokens; give at most {MAX_STOP_TOKENS}"
            )

    async def _work(self) -> None:
        """Run rounds until no request is left. An error fails every pending request."""
        scheduler = self._scheduler
        try:
            while scheduler.waiting or scheduler.running:
                with explain_out_of_memory("the engine", _MEMORY_REMEDY, self._memory_plan):
                    n_slots, steps = self._launch_round()
                scheduler.reserve_ahead(steps)
                self._finish_round(*await self._slots.fetch_outputs(n_slots, steps))
        except BaseException as error:
            failed = [*scheduler.waiting, *scheduler.running]
            scheduler.waiting = []
            for request in list(scheduler.running):
                scheduler.free(request)
            for request in failed:
                if not request.future.done():
                    request.future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    @torch.inference_mode()
    def _launch_round(self) -> tuple[int, int]:
        """Queue one round.

        Return its number of slots and of decoding steps after the first token.
        """
        scheduler, self._round_version = self._scheduler, self._policy_version
        if self._cache_is_stale:
            self._cache_is_stale = False
            scheduler.restart_all()
        scheduler.drop_cancelled()
        self._slots.begin_round()
        # Blocks that waiting requests will share are computed before anything queued later. A chunked
        # prompt is continued at once: the host would only wait, and its first token comes sooner.
        for _ in range(_MAX_PREFILLS_PER_ROUND):
            self._run_prefill()
            if not scheduler.waits_for_prefix and all(r.is_decoding for r in scheduler.running):
                break
        decoding = scheduler.decoding
        steps = min(self._steps_per_round, max((r.n_remaining for r in decoding), default=0))
        if len(decoding) < len(scheduler.running) or scheduler.waits_for_prefix:
            steps = 0  # a decoding step costs the same for many as for few: prefill all first
        if steps:
            self._prepare_decode(decoding, steps)
        n_slots = 1 + max((r.slot for r in scheduler.running), default=-1)
        if steps:
            self._slots.decode(n_slots, steps, truncated=self._truncated)
        return n_slots, steps

    @property
    def _truncated(self) -> bool:
        return any(r.sampling.truncates for r in self._scheduler.running)

    def _run_prefill(self) -> None:
        """Queue one prefill pass, and sample the first token of every prompt that it completes."""
        admitted = self._scheduler.admit()
        self._deactivate_freed_slots()
        batch = self._scheduler.next_prefill()
        if not batch:
            return
        hidden_TE = self._prefill.run([chunk for _, chunk in batch])
        self.tokens_computed += len(hidden_TE)
        # Queued behind the prefill, so the device is already at work meanwhile.
        self._slots.assign(admitted)
        last = -1
        completed: dict[int, int] = {}  # slot -> row of its last token's hidden state
        for request, chunk in batch:
            last += chunk.stop - chunk.start
            request.n_computed = chunk.stop
            self._scheduler.register_blocks(request)
            if chunk.stop == len(request.token_ids):
                request.is_decoding = True
                completed[request.slot] = last
        if completed:
            hidden_ME = hidden_TE[copy_to_device([*completed.values()], hidden_TE.device)]
            self._slots.sample_first(hidden_ME, [*completed], truncated=self._truncated)
            self._scheduler.decode_batch_changed = True

    def _prepare_decode(self, decoding: Sequence[Request], steps: int) -> None:
        """Reserve KV blocks for the round, and send the device what changed since the last one."""
        scheduler = self._scheduler
        scheduler.reserve(decoding, steps)
        if scheduler.block_table_changed:
            self._slots.set_block_table(scheduler.block_table)
            scheduler.block_table_changed = False
        if scheduler.decode_batch_changed:
            lengths = {r.slot: len(r.token_ids) for r in decoding if r.is_decoding}
            self._slots.update_prefix_groups(scheduler.block_table, lengths)
            scheduler.decode_batch_changed = False
        self._deactivate_freed_slots()

    def _deactivate_freed_slots(self) -> None:
        self._slots.deactivate(self._scheduler.freed_slots)
        self._scheduler.freed_slots.clear()

    def _finish_round(self, tokens_SK: list[list[int]], logprobs_SK: list[list[float]]) -> None:
        """Give every sequence its tokens of this round, and complete those that finished."""
        for request in self._scheduler.decoding:
            before, slot = len(request.sampled), request.slot
            # Weights that arrived since the launch are queued behind the round.
            request.note_version(self._round_version)
            finish = collect_outputs(request, tokens_SK[slot], logprobs_SK[slot], self._decode_text)
            self.tokens_computed += len(request.sampled) - before
            request.n_computed = len(request.token_ids) - 1
            if finish:
                self._scheduler.free(request)
                if not request.future.done():
                    request.future.set_result(request.to_completion(finish))


def collect_outputs(
    request: Request,
    tokens_K: Sequence[int],
    logprobs_K: Sequence[float],
    decode_text: Callable[[Sequence[int]], str],
) -> Finish | None:
    """Append a slot's tokens of one round to its request; return the finish reason, None if it
    continues.

    The device ends a turn at a stop token or at the length limit, which can only be the last token.
    The host finds stop strings.
    """
    # Index 0 is for requests that started to decode in this round; -1 fills the end.
    start = 0 if tokens_K[0] >= 0 else 1
    stop = len(tokens_K) - tokens_K[start:].count(-1)
    tokens, logprobs = tokens_K[start:stop], logprobs_K[start:stop]
    stops = request.sampling.stop
    recent = [*request.sampled[-stop_window(stops) :], *tokens] if stops else []
    has_stop = stops and ends_with_stop(stops, recent, decode_text, n_new=len(tokens))
    # Only with a stop string among them is every token checked alone.
    stride = 1 if has_stop else max(len(tokens), 1)
    for at in range(0, len(tokens), stride):
        request.append(tokens[at : at + stride], logprobs[at : at + stride])
        if finish := detect_finish(request.sampling, request.sampled, decode_text):
            return finish
    return None
