"""KV cache of the CPU engine: contiguous rows, prefix caching by copy, and attention.

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


@dataclass(slots=True)
class Row:
    index: int
    token_ids: list[int] = field(default_factory=list)
    """The tokens whose keys and values the row holds."""
    block_hashes: list[int] = field(default_factory=list)
    """One per full block, of the whole prefix up to the block's end."""


class KVCache:
    def __init__(self, decoder: Decoder, *, rows: int, capacity: int) -> None:
        shape = (decoder.n_layers, rows, decoder.n_kv_heads, capacity, decoder.head_dim)
        self.keys = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self.values = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self.capacity = capacity
        self._free = [Row(index) for index in range(rows)]
        self._cached: dict[int, Row] = {}
        """Hash of a prefix -> a row that holds it, in use or released and not yet reused."""

    def allocate(self) -> Row | None:
        """Take the free row of lowest index, because decoding runs over all rows up to the
        highest."""
        if not self._free:
            return None
        row = min(self._free, key=lambda free: free.index)
        self._free.remove(row)
        self.truncate(row)
        return row

    def release(self, row: Row) -> None:
        self._free.append(row)

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
        for tensor in (self.keys, self.values):
            tensor[:, row.index, :, :shared] = tensor[:, source.index, :, :shared]
        self.extend(row, token_ids[:shared])

    def extend(self, row: Row, token_ids: Sequence[int]) -> None:
        """Record that the row also holds the keys and values of these tokens."""
        row.token_ids.extend(token_ids)
        for block_hash in hash_blocks(row.token_ids, row.block_hashes):
            row.block_hashes.append(block_hash)
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
        self._cache = cache
        device = cache.keys.device
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
            bias_RL = torch.zeros(hidden_RL.shape, dtype=cache.keys.dtype, device=device)
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
        at_BQ = starts.unsqueeze(1) + torch.minimum(query, lengths.unsqueeze(1) - 1)
        key = torch.arange(self._long_width, device=device)
        self._visible_B1QL = (key <= at_BQ.unsqueeze(2)).unsqueeze(1)

    def _prefill(self, q_THD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q_BHQD = q_THD[self._gather_BQ].transpose(1, 2)
        out_BHQD = torch.nn.functional.scaled_dot_product_attention(
            q_BHQD,
            keys[self._long_rows, :, : self._long_width],
            values[self._long_rows, :, : self._long_width],
            attn_mask=self._visible_B1QL,
            enable_gqa=q_THD.shape[1] != keys.shape[1],
        )
        return out_BHQD.transpose(1, 2)[self._real_BQ]
