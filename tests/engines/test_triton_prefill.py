"""Paged prefill attention equals its reference in plain torch, and bit for bit the learner's attention."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from skyfleet.engines.cuda import torch_kernels as reference
from skyfleet.engines.prefix_cache import BLOCK_SIZE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()),
        reason="needs a CUDA device, or Triton's interpreter: make kernels",
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 16), (8, 2, 128)])
def test_prefill_attention_equals_the_reference(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype
) -> None:
    from skyfleet.engines.cuda.triton_attention import paged_prefill_attention

    torch.manual_seed(0)
    rows = 16 if dtype == torch.float32 else 128
    # (tokens before, new tokens): from the start, longer than a tile, one token far in, ends of blocks.
    chunks = [(0, 5), (3, 150), (200, 1), (BLOCK_SIZE - 1, 2), (64, 64)]
    block_ids: list[int] = []
    tiles: list[tuple[int, int, int, int]] = []
    first, n_blocks = 0, 1
    for start, n_new in chunks:
        blocks_at, n_own = len(block_ids), -(-(start + n_new) // BLOCK_SIZE)
        block_ids += range(n_blocks, n_blocks + n_own)
        n_blocks += n_own
        tiles += [
            (first + ahead, min(rows, n_new - ahead), start + ahead, blocks_at)
            for ahead in range(0, n_new, rows)
        ]
        first += n_new
    tiles += [(0, 0, 0, 0)] * 3

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    q_THD, keys, values = (
        random_tensor(first, heads, width),
        random_tensor(n_blocks, BLOCK_SIZE, kv_heads, width),
        random_tensor(n_blocks, BLOCK_SIZE, kv_heads, width),
    )
    tiles_B4 = torch.tensor(tiles, dtype=torch.int32, device=DEVICE)
    blocks_P = torch.tensor(block_ids, dtype=torch.int32, device=DEVICE)
    result = paged_prefill_attention(q_THD, keys, values, tiles_B4, blocks_P, rows)
    exact = reference.paged_prefill_attention(
        q_THD.double(), keys.double(), values.double(), tiles_B4, blocks_P, rows
    )
    # Tensor cores that round float32 would be up to 1e-3 away.
    apart = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(result.double(), exact, atol=apart, rtol=apart)


@pytest.mark.parametrize(("start", "n_new"), [(0, 130), (383, 200), (511, 1), (512, 1), (640, 128)])
def test_paged_prefill_has_the_bits_of_the_learners_packed_attention(
    start: int, n_new: int
) -> None:
    from skyfleet.engines.cuda.triton_attention import paged_prefill_attention
    from skyfleet.models.fused.triton_flash_attention import flash_forward

    torch.manual_seed(0)
    n_heads, n_kv, width, stop = 4, 2, 16, start + n_new
    n_blocks = -(-stop // BLOCK_SIZE)

    def random_tensor(*shape: int) -> torch.Tensor:
        return 4 * torch.randn(*shape, device=DEVICE).half()

    keys, values = (
        random_tensor(1 + n_blocks, BLOCK_SIZE, n_kv, width),
        random_tensor(1 + n_blocks, BLOCK_SIZE, n_kv, width),
    )
    keys[0] = values[0] = float("nan")  # the null block
    q_THD = random_tensor(n_new, n_heads, width)
    blocks_P = (1 + torch.randperm(n_blocks)).int().to(DEVICE)
    tiles = [(a, min(128, n_new - a), start + a, 0) for a in range(0, n_new, 128)]
    tiles_B4 = torch.tensor([*tiles, (0, 0, 0, 0)], dtype=torch.int32, device=DEVICE)
    result = paged_prefill_attention(q_THD, keys, values, tiles_B4, blocks_P, 128)
    k_LKD, v_LKD = (x[blocks_P.long()].flatten(0, 1)[:stop].contiguous() for x in (keys, values))
    q_ends, k_ends = (torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (n_new, stop))
    learner_out, _ = flash_forward(q_THD, k_LKD, v_LKD, q_ends, k_ends, n_new)
    assert torch.equal(result, learner_out)
