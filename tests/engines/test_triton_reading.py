"""Reading over pages is what it is in plain torch, and bit for bit the learner's own attention."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from skyfleet.engines.cuda import torch_kernels as twins
from skyfleet.engines.cuda.block_pool import PAGE

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
def test_new_tokens_meet_their_sequences_pages(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype
) -> None:
    from skyfleet.engines.cuda.triton_prefill import read_pages

    torch.manual_seed(0)
    rows = 16 if dtype == torch.float32 else 128
    # (tokens before, new tokens): fresh, longer than a block, one token far in, ends of pages.
    spans = [(0, 5), (3, 150), (200, 1), (PAGE - 1, 2), (64, 64)]
    pages: list[int] = []
    blocks: list[tuple[int, int, int, int]] = []
    first, n_pages = 0, 1
    for start, n_new in spans:
        pages_at, n_own = len(pages), -(-(start + n_new) // PAGE)
        pages += range(n_pages, n_pages + n_own)
        n_pages += n_own
        blocks += [
            (first + ahead, min(rows, n_new - ahead), start + ahead, pages_at)
            for ahead in range(0, n_new, rows)
        ]
        first += n_new
    blocks += [(0, 0, 0, 0)] * 3

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    q_THD, keys, values = (
        drawn(first, heads, width),
        drawn(n_pages, PAGE, kv_heads, width),
        drawn(n_pages, PAGE, kv_heads, width),
    )
    blocks_B4 = torch.tensor(blocks, dtype=torch.int32, device=DEVICE)
    pages_P = torch.tensor(pages, dtype=torch.int32, device=DEVICE)
    said = read_pages(q_THD, keys, values, blocks_B4, pages_P, rows)
    exact = twins.read_pages(
        q_THD.double(), keys.double(), values.double(), blocks_B4, pages_P, rows
    )
    # Tensor cores that round float32 would be up to 1e-3 away.
    apart = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(said.double(), exact, atol=apart, rtol=apart)


@pytest.mark.parametrize(("start", "n_new"), [(0, 130), (383, 200), (511, 1), (512, 1), (640, 128)])
def test_pages_give_the_bits_of_sequences_laid_end_to_end(start: int, n_new: int) -> None:
    from skyfleet.engines.cuda.triton_prefill import read_pages
    from skyfleet.models.fused.triton_products import read

    torch.manual_seed(0)
    n_heads, n_kv, width, stop = 4, 2, 16, start + n_new
    n_pages = -(-stop // PAGE)

    def drawn(*shape: int) -> torch.Tensor:
        return 4 * torch.randn(*shape, device=DEVICE).half()

    keys, values = drawn(1 + n_pages, PAGE, n_kv, width), drawn(1 + n_pages, PAGE, n_kv, width)
    keys[0] = values[0] = float("nan")  # the page that is nobody's
    q_THD = drawn(n_new, n_heads, width)
    pages_P = (1 + torch.randperm(n_pages)).int().to(DEVICE)
    blocks = [(a, min(128, n_new - a), start + a, 0) for a in range(0, n_new, 128)]
    blocks_B4 = torch.tensor([*blocks, (0, 0, 0, 0)], dtype=torch.int32, device=DEVICE)
    said = read_pages(q_THD, keys, values, blocks_B4, pages_P, 128)
    k_LKD, v_LKD = (x[pages_P.long()].flatten(0, 1)[:stop].contiguous() for x in (keys, values))
    q_ends, k_ends = (torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (n_new, stop))
    learners, _ = read(q_THD, k_LKD, v_LKD, q_ends, k_ends, n_new)
    assert torch.equal(said, learners)
