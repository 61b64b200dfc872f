"""KV cache of the CPU engine: contiguous rows that grow on demand, prefix caching by copy, and
attention.

Contiguous rows let a decoding step run over all sessions with two matrix products.
`cuda/block_pool.py` is the paged cache of the CUDA engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skyfleet.engines.prefix_cache import BLOCK_SIZE, find_cached_prefix, hash_blocks
from skyfleet.models.decoder import Decoder

MASK_CELLS = 2**25
"""Padded cells of an attention mask at once; torch holds five bytes for each."""


@dataclass(slots=True)
class Row:
    index: int
    token_ids: list[int] = field(default_factory=list)
    """The tokens whose keys and values the row holds."""
    block_hashes: list[int] = field(default_factory=list)
    """One per full block, of the whole prefix up to the block's end."""
    is_shared: bool = True
    """False once weights arrived that did not compute what it holds."""


class KVCache:
    def __init__(self, decoder: Decoder, *, rows: int, capacity: int) -> None:
        """At most `rows` sequences of at most `capacity` tokens."""
        self.capacity, self._max_rows = capacity, rows
        self._decoder = decoder
        self.keys: list[Tensor] = []
        """Per layer [rows, kv heads, tokens, head dim]; empty until the first token."""
        self.values: list[Tensor] = []
        self._free = [Row(index) for index in range(rows)]
        self._used: list[Row] = []
        self._cached: dict[int, Row] = {}
        """Hash of a prefix -> a row that holds it, in use or released and not yet reused."""

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def reserve(self, *, rows: int, tokens: int) -> None:
        """Make room for the first `rows` rows of `tokens` tokens; what they hold is kept.

        Both sides at least double, so that decoding, which adds one token at a time, seldom copies.
        """
        held_rows, held_tokens = self._shape
        if rows <= held_rows and tokens <= held_tokens:
            return
        if rows > held_rows:
            held_rows = max(rows, min(2 * held_rows, self._max_rows))
        if tokens > held_tokens:
            held_tokens = max(tokens, min(2 * held_tokens, self.capacity))
        decoder = self._decoder
        shape = (held_rows, decoder.n_kv_heads, held_tokens, decoder.head_dim)
        for tensors in (self.keys, self.values):
            # One layer at a time: old and new memory exist together for a single layer only.
            for layer in range(decoder.n_layers):
                # Zeros, because a masked value still enters a product; unused pages take no memory.
                grown = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
                if layer < len(tensors):
                    old = tensors[layer]
                    grown[: old.shape[0], :, : old.shape[2]] = old
                    tensors[layer] = grown
                else:
                    tensors.append(grown)

    def free_memory(self) -> None:
        """Drop all content and return its memory. All rows must be free."""
        self.reset_prefix_cache()
        self.keys, self.values = [], []

    @property
    def _shape(self) -> tuple[int, int]:
        """Rows and tokens per row that there is memory for."""
        return (self.keys[0].shape[0], self.keys[0].shape[2]) if self.keys else (0, 0)

    def allocate(self) -> Row | None:
        """Take the free row of lowest index, because decoding runs over all rows up to the
        highest."""
        if not self._free:
            return None
        row = min(self._free, key=lambda free: free.index)
        self._free.remove(row)
        self.truncate(row)
        row.is_shared = True
        self._used.append(row)
        return row

    def release(self, row: Row) -> None:
        self._used.remove(row)
        self._free.append(row)
        if not row.is_shared:
            self.truncate(row)

    def stop_sharing(self) -> None:
        """New weights arrived: rows in use keep what they hold, and no other row copies it."""
        self.reset_prefix_cache()
        self._cached.clear()
        for row in self._used:
            row.is_shared = False

    def reset_prefix_cache(self) -> None:
        """Drop all cached content, because the weights changed. All rows must be free."""
        for row in self._free:
            self.truncate(row)

    def keep_prefix(self, row: Row, token_ids: Sequence[int]) -> int:
        """Truncate `row` to its common prefix with `token_ids`; return the length of the prefix.

        At least one token is left to compute, because its output predicts the next.
        """
        limit = min(len(row.token_ids), len(token_ids) - 1)
        shared = 0
        while shared < limit and row.token_ids[shared] == token_ids[shared]:
            shared += 1
        self.truncate(row, keep=shared)
        return shared

    def copy_cached_prefix(self, row: Row, token_ids: Sequence[int]) -> None:
        """Fill an empty row with the longest cached prefix of `token_ids`."""
        holders = find_cached_prefix(hash_blocks(token_ids[:-1]), self._cached)
        if not holders:
            return
        source, shared = holders[-1], len(holders) * BLOCK_SIZE
        # Compare the tokens, because hashes may collide.
        if source.token_ids[:shared] != list(token_ids[:shared]):
            return
        self.reserve(rows=row.index + 1, tokens=shared)
        for tensor in (*self.keys, *self.values):
            tensor[row.index, :, :shared] = tensor[source.index, :, :shared]
        self.extend(row, token_ids[:shared])

    def extend(self, row: Row, token_ids: Sequence[int]) -> None:
        """Record that the row also holds the keys and values of these tokens."""
        row.token_ids.extend(token_ids)
        for block_hash in hash_blocks(row.token_ids, row.block_hashes):
            row.block_hashes.append(block_hash)
            if row.is_shared:
                self._cached.setdefault(block_hash, row)

    def truncate(self, row: Row, *, keep: int = 0) -> None:
        """Drop all but the first `keep` tokens of a row."""
        for block_hash in row.block_hashes[keep // BLOCK_SIZE :]:
            if self._cached.get(block_hash) is row:
                del self._cached[block_hash]
        del row.block_hashes[keep // BLOCK_SIZE :], row.token_ids[keep:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one row that one forward pass computes."""

    row: int
    start: int
    length: int


class CachedAttention:
    """Attention of one forward pass over the cache, which also writes the new keys and values.

    Segments of one token (decoding) come first and run over whole cache rows in place. Longer ones
    (prefill) are padded to a rectangle.
    """

    def __init__(self, cache: KVCache, segments: Sequence[Segment]) -> None:
        cache.reserve(
            rows=max(s.row for s in segments) + 1,
            tokens=max(s.start + s.length for s in segments),
        )
        self._cache = cache
        device = cache.keys[0].device
        self._n_single = sum(s.length == 1 for s in segments)
        single, self._long = segments[: self._n_single], segments[self._n_single :]
        rows = [s.row for s in segments for _ in range(s.length)]
        positions = [p for s in segments for p in range(s.start, s.start + s.length)]
        self._rows_T = torch.tensor(rows, device=device)
        self.positions_T = torch.tensor(positions, device=device)
        if single:
            self._n_rows = max(rows[: self._n_single]) + 1
            self._width = max(s.start for s in single) + 1
            # Usually every row decodes, in order: then queries need no reordering.
            in_place = rows[: self._n_single] == list(range(self._n_rows))
            self._single_rows = None if in_place else self._rows_T[: self._n_single]
            ends_R = self._scatter_to_rows(self.positions_T[: self._n_single])
            hidden_RL = torch.arange(self._width, device=device) > ends_R.unsqueeze(1)
            bias_RL = torch.zeros(hidden_RL.shape, dtype=cache.keys[0].dtype, device=device)
            self._bias_R11L = bias_RL.masked_fill_(hidden_RL, -torch.inf)[:, None, None, :]
        if self._long:
            self._prepare_long(device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows_T, :, self.positions_T] = k_TKD
        values[self._rows_T, :, self.positions_T] = v_TKD
        n = self._n_single
        if not self._long:
            return self._decode(q_THD, keys, values)
        if n == 0:
            return self._prefill(q_THD, keys, values)
        return torch.cat(
            (self._decode(q_THD[:n], keys, values), self._prefill(q_THD[n:], keys, values))
        )

    def _decode(self, q_NHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        n_heads, width = q_NHD.shape[1:]
        n_kv = keys.shape[1]
        q_RHD = self._scatter_to_rows(q_NHD * width**-0.5)
        q_RKGD = q_RHD.view(self._n_rows, n_kv, n_heads // n_kv, width)
        k_RKLD = keys[: self._n_rows, :, : self._width]
        v_RKLD = values[: self._n_rows, :, : self._width]
        scores = torch.matmul(q_RKGD, k_RKLD.transpose(2, 3)) + self._bias_R11L
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v_RKLD.dtype)
        out_RHD = torch.matmul(weights, v_RKLD).flatten(1, 2)
        return out_RHD if self._single_rows is None else out_RHD[self._single_rows]

    def _scatter_to_rows(self, x_N: Tensor) -> Tensor:
        """Lay out decoding segments by cache row, with zeros for the other rows."""
        if self._single_rows is None:
            return x_N
        x_R = x_N.new_zeros(self._n_rows, *x_N.shape[1:])
        x_R[self._single_rows] = x_N
        return x_R

    def _prepare_long(self, device: torch.device) -> None:
        lengths = torch.tensor([s.length for s in self._long], device=device)
        starts = torch.tensor([s.start for s in self._long], device=device)
        self._long_rows = torch.tensor([s.row for s in self._long], device=device)
        self._long_width = max(s.start + s.length for s in self._long)
        query = torch.arange(int(lengths.max()), device=device)
        self._real_BQ = query < lengths.unsqueeze(1)
        offsets = lengths.cumsum(0) - lengths
        self._gather_BQ = offsets.unsqueeze(1) + torch.minimum(query, lengths.unsqueeze(1) - 1)
        self._at_BQ = starts.unsqueeze(1) + torch.minimum(query, lengths.unsqueeze(1) - 1)
        n_cells = self._at_BQ.numel() * self._long_width
        self._visible_B1QL = self._mask(slice(None)) if n_cells <= MASK_CELLS else None

    def _prefill(self, q_THD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self._visible_B1QL is not None:
            return self._attend(q_THD, keys, values, slice(None), self._visible_B1QL)
        # One long prompt pads many short ones: attend a few sequences at a time, equally padded.
        size = max(1, MASK_CELLS // (self._at_BQ.shape[1] * self._long_width))
        parts = [slice(first, first + size) for first in range(0, len(self._long), size)]
        return torch.cat(
            [self._attend(q_THD, keys, values, part, self._mask(part)) for part in parts]
        )

    def _attend(
        self, q_THD: Tensor, keys: Tensor, values: Tensor, part: slice, visible_B1QL: Tensor
    ) -> Tensor:
        """Attention of some of the longer segments."""
        out_BHQD = torch.nn.functional.scaled_dot_product_attention(
            q_THD[self._gather_BQ[part]].transpose(1, 2),
            keys[self._long_rows[part], :, : self._long_width],
            values[self._long_rows[part], :, : self._long_width],
            attn_mask=visible_B1QL,
            enable_gqa=q_THD.shape[1] != keys.shape[1],
        )
        return out_BHQD.transpose(1, 2)[self._real_BQ[part]]

    def _mask(self, part: slice) -> Tensor:
        key = torch.arange(self._long_width, device=self._at_BQ.device)
        return (key <= self._at_BQ[part].unsqueeze(2)).unsqueeze(1)
