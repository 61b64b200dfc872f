"""Prefill of the CUDA engine: padded passes, static buffers and graph sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from tests.fakes.cuda_engines import SAMPLING, crowd, engine, page_bytes
from tests.fakes.small_models import small_decoder

from skyfleet.engines.cuda import prefill
from skyfleet.models.decoder import Decoder


async def test_padded_and_unpadded_prefill_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: set[int] = set()
    forward = prefill.Prefill._forward

    def recorded_forward(self: prefill.Prefill, inputs: prefill.PrefillInputs) -> torch.Tensor:
        sizes.add(inputs.tokens_3T.shape[1])
        return forward(self, inputs)

    monkeypatch.setattr(prefill.Prefill, "_forward", recorded_forward)
    padded = await crowd(engine(), SAMPLING)
    assert sizes <= {*prefill.GRAPH_SIZES}
    sizes.clear()
    monkeypatch.setattr(prefill, "_LAUNCH_BOUND_FLOPS", 0)
    plain = await crowd(engine(), SAMPLING)
    assert not sizes & {*prefill.GRAPH_SIZES}
    assert [c.token_ids for c in padded] == [c.token_ids for c in plain]
    for one, other in zip(padded, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


async def test_short_prompts_in_every_slot_fit_one_pass() -> None:
    # 17 tokens are a tile of 16 and one of a single token: 15 tiles of 120 tokens, padded to 128.
    policy_model = engine()
    completion = await asyncio.gather(
        *(
            policy_model.generate([n] * (17 if n else 1), SAMPLING, session=f"s{n}")
            for n in range(8)
        )
    )
    assert all(len(c.token_ids) == 12 for c in completion)


async def test_sequences_may_name_more_shared_blocks_than_the_pool_has() -> None:
    # Nine blocks each, eight of them shared: the second pass names 63 blocks, and the pool has 20.
    decoder = small_decoder()
    policy_model = engine(decoder, memory_bytes=20 * page_bytes(decoder))
    completion = await asyncio.gather(
        *(policy_model.generate([1] * 128 + [n], SAMPLING, session=f"s{n}") for n in range(8))
    )
    assert all(len(c.token_ids) == 12 for c in completion)


def test_graph_recording_continues_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    room = 2

    class Graph:
        def replay(self) -> None: ...

    def record(work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        if len(recorded) == room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        hidden_TE = work()
        recorded.append(len(hidden_TE))
        return Graph(), hidden_TE

    prefiller = engine(max_num_batched_tokens=512)._prefill
    monkeypatch.setattr(prefiller._recorder, "record", record)
    with pytest.raises(torch.OutOfMemoryError):
        prefiller._graph(64)
    room = 6
    assert len(prefiller._graph(64)(prefiller._static)) == 64
    assert recorded == [512, 384, 256, 128, 64, 32]


@pytest.mark.parametrize(("max_tokens", "largest"), [(100, 128), (128, 128), (8192, 8192)])
def test_graphs_are_recorded_up_to_the_token_budget(max_tokens: int, largest: int) -> None:
    policy_model = engine(max_num_batched_tokens=max_tokens)
    assert max(policy_model._prefill._sizes) == largest


def test_compute_bound_passes_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = count_layer_weights(small_decoder())
    monkeypatch.setattr(prefill, "_LAUNCH_BOUND_FLOPS", 2 * weights * 300)
    assert max(engine()._prefill._sizes) == 256


def count_layer_weights(decoder: Decoder) -> int:
    """Weights of the seven projections of one layer."""
    layer = decoder.layers[0]
    return sum(m.weight.numel() for m in layer.modules() if isinstance(m, torch.nn.Linear))
