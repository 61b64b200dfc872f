"""Scheduler of the CUDA engine: waiting and running requests, slots, KV blocks and prefill chunks.

The scheduler runs on the host. It admits waiting requests, shares cached prefixes between them,
picks the prompt tokens of the next prefill pass, and preempts a request when KV blocks run out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines.cuda.block_pool import KVBlockPool, n_blocks_for
from skyfleet.engines.cuda.prefill import PrefillChunk
from skyfleet.engines.prefix_cache import BLOCK_SIZE, hash_blocks
from skyfleet.engines.sampler import make_rng
from skyfleet.engines.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    session: str
    token_ids: list[int]
    """The prompt, followed by the sampled tokens."""
    sampling: SamplingParams
    future: asyncio.Future[Completion]
    n_prompt: int
    policy_version: int
    """The version that sampled the first token."""
    block_hashes: list[int]
    salt: int = 0
    """Of its block hashes: only requests with the same one share blocks."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    n_computed: int = 0
    """Tokens whose keys and values are in the blocks."""
    n_registered: int = 0
    """Blocks that other requests can share."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_changes: list[tuple[int, int]] = field(default_factory=list)
    is_decoding: bool = False
    """The prefill is complete."""

    def note_version(self, version: int) -> None:
        """`version` samples the next tokens."""
        newest = self.version_changes[-1][1] if self.version_changes else self.policy_version
        if not self.sampled:
            self.policy_version = version
        elif version != newest:
            self.version_changes.append((len(self.sampled), version))

    def draw_uniforms(self) -> np.ndarray:
        """One uniform number per token that the request may generate."""
        rng = make_rng(self.sampling.seed, self.session, self.n_prompt)
        return rng.random(self.sampling.max_generate_length)

    @property
    def n_remaining(self) -> int:
        """Tokens that it may still generate."""
        return self.sampling.max_generate_length - len(self.logprobs)

    def n_tokens_after(self, steps: int) -> int:
        """Tokens after `steps` steps, plus the one being written.

        Capped at what the request was admitted for, or it might not fit even alone.
        """
        return len(self.token_ids) + 1 + min(steps, self.n_remaining)

    @property
    def n_shareable(self) -> int:
        """Full blocks that may come from the cache: one token is always computed, to predict the
        next."""
        return (len(self.token_ids) - 1) // BLOCK_SIZE

    @property
    def prefix_key(self) -> int:
        """Hash of the shareable prefix; unique where there is none."""
        return self.block_hashes[self.n_shareable - 1] if self.n_shareable else id(self)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.token_ids += tokens
        self.sampled += tokens
        self.logprobs += logprobs

    def to_completion(self, finish: Finish) -> Completion:
        return Completion(
            token_ids=tuple(self.sampled),
            logprobs=tuple(self.logprobs),
            finish=finish,
            policy_version=self.policy_version,
            version_changes=tuple(
                # A round may end with tokens that the turn does not have.
                change
                for change in self.version_changes
                if change[0] < len(self.sampled)
            ),
        )


class Scheduler:
    def __init__(
        self, *, n_slots: int, n_blocks: int, table_width: int, max_num_batched_tokens: int
    ) -> None:
        self._pool = KVBlockPool(n_blocks)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._free_slots = list(range(n_slots))
        """A heap: the lowest slot goes first, because decoding runs over all slots up to the
        highest."""
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.waits_for_prefix = False
        """Some requests wait for a running prefill, whose blocks they will share."""
        self.block_table = np.zeros((n_slots, table_width), dtype=np.int32)
        """The blocks of each slot, in order."""
        self.block_table_changed = False
        self.decode_batch_changed = False
        """A request was admitted, started to decode, or left: prefix groups must be found again."""
        self.freed_slots: list[int] = []
        """Slots that the device must deactivate, because the host ended their request."""

    @property
    def n_blocks(self) -> int:
        return self._pool.n_blocks

    @property
    def n_available(self) -> int:
        return self._pool.n_available

    @property
    def is_full(self) -> bool:
        return not self._free_slots

    @property
    def decoding(self) -> list[Request]:
        return [request for request in self.running if request.is_decoding]

    def drop_cancelled(self) -> None:
        for request in [r for r in self.running if r.future.done()]:
            self.free(request)
        self.waiting = [r for r in self.waiting if not r.future.done()]

    def admit(self) -> list[Request]:
        """Give waiting requests a slot and blocks while there are any; return those admitted."""
        prefilling = {r.prefix_key for r in self.running if not r.is_decoding}
        still_waiting: list[Request] = []
        admitted: list[Request] = []
        self.waits_for_prefix = False
        for request in self.waiting:
            # While its prefix is being computed for another request, it waits to share the blocks.
            must_wait = request.prefix_key in prefilling and not self.is_full
            self.waits_for_prefix |= must_wait
            if must_wait or not self.allocate(request):
                still_waiting.append(request)
                continue
            admitted.append(request)
            if request.block_hashes and request.n_registered < request.n_shareable:
                prefilling.add(request.prefix_key)
        self.waiting = still_waiting
        self.running += admitted
        return admitted

    def next_prefill(self) -> list[tuple[Request, PrefillChunk]]:
        """Prompt tokens that are not computed yet, up to the token budget of one pass."""
        budget = self._max_num_batched_tokens
        chunks: list[tuple[Request, PrefillChunk]] = []
        for request in self.running:
            stop = min(len(request.token_ids), request.n_computed + budget)
            if request.is_decoding or stop == request.n_computed:
                continue
            budget -= stop - request.n_computed
            chunk = PrefillChunk(
                token_ids=request.token_ids[request.n_computed : stop],
                blocks=self.block_table[request.slot, : len(request.blocks)],
                start=request.n_computed,
                stop=stop,
            )
            chunks.append((request, chunk))
        return chunks

    def reserve(self, decoding: Sequence[Request], steps: int) -> None:
        """Reserve blocks for the next `steps` tokens of each request.

        Preempt the latest if they run out.
        """
        candidates = list(decoding)
        for request in decoding:
            while request.is_decoding:
                if self.grow(request, request.n_tokens_after(steps)):
                    break
                # Never the only one: `generate` rejects a request that would not fit alone.
                self.preempt(candidates.pop())

    def reserve_ahead(self, steps: int) -> None:
        """While the device computes: register new full blocks and reserve those of the next
        round."""
        for request in self.running if steps else ():
            self.register_blocks(request)
            if request.n_remaining > steps:
                self.grow(request, request.n_tokens_after(2 * steps))

    def allocate(self, request: Request) -> bool:
        """Assign a slot and blocks for the prompt, cached ones first; False if there is no room."""
        if self.is_full:
            return False
        cached = self._pool.acquire_cached(request.block_hashes[: request.n_shareable])
        new = self._pool.allocate(n_blocks_for(len(request.token_ids)) - len(cached))
        if new is None:
            self._pool.release(cached)
            return False
        request.n_computed, request.n_registered = len(cached) * BLOCK_SIZE, len(cached)
        request.blocks = cached + new
        request.slot = heappop(self._free_slots)
        self.block_table[request.slot, : len(request.blocks)] = request.blocks
        self.decode_batch_changed = self.block_table_changed = True
        return True

    def grow(self, request: Request, n_tokens: int) -> bool:
        """Extend the request's blocks to `n_tokens` in total; False if too few are left."""
        n_held = len(request.blocks)
        n_wanted = min(n_blocks_for(n_tokens), self.block_table.shape[1])
        if n_wanted <= n_held:
            return True
        new = self._pool.allocate(n_wanted - n_held)
        if new is None:
            return False
        request.blocks += new
        self.block_table[request.slot, n_held:n_wanted] = new
        self.block_table_changed = True
        return True

    def register_blocks(self, request: Request) -> None:
        """Make every full, computed block of the request available to others."""
        request.block_hashes += hash_blocks(
            request.token_ids, request.block_hashes, salt=request.salt
        )
        n_full = min(request.n_computed // BLOCK_SIZE, len(request.block_hashes))
        for at in range(request.n_registered, n_full):
            self._pool.register(request.blocks[at], request.block_hashes[at])
        request.n_registered = max(request.n_registered, n_full)

    def free(self, request: Request) -> None:
        """Take the request out of the batch. Its blocks stay cached until they are needed."""
        self.running.remove(request)
        self.register_blocks(request)
        self._pool.release(request.blocks)
        heappush(self._free_slots, request.slot)
        self.freed_slots.append(request.slot)
        self.decode_batch_changed = True
        request.blocks, request.slot, request.is_decoding = [], -1, False

    def preempt(self, request: Request) -> None:
        """Move a running request back to the queue.

        It continues after its tokens are prefilled again.
        """
        self.free(request)
        self.waiting.insert(0, request)

    def restart_all(self) -> None:
        """The weights changed: drop the prefix cache and prefill every running request again."""
        for request in reversed(list(self.running)):
            self.preempt(request)
        self._pool.reset_prefix_cache()
