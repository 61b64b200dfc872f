"""How the CUDA engine reads prompts: in passes of a few sizes, within buffers made once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from tests.fakes.cuda_engines import SAMPLING, crowd, engine, page_bytes
from tests.fakes.small_models import small_decoder

from skyfleet.engines.cuda import prefill as reading
from skyfleet.models.decoder import Decoder


async def test_prompts_are_read_alike_padded_to_a_size_and_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: set[int] = set()
    forward = reading.Reading._forward

    def noted(self: reading.Reading, inputs: reading.Inputs) -> torch.Tensor:
        sizes.add(inputs.tokens_3T.shape[1])
        return forward(self, inputs)

    monkeypatch.setattr(reading.Reading, "_forward", noted)
    padded = await crowd(engine(), SAMPLING)
    assert sizes <= {*reading.SIZES}
    sizes.clear()
    monkeypatch.setattr(reading, "_LAUNCHES_FLOPS", 0)
    plain = await crowd(engine(), SAMPLING)
    assert not sizes & {*reading.SIZES}
    assert [c.token_ids for c in padded] == [c.token_ids for c in plain]
    for one, other in zip(padded, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


async def test_short_prompts_through_every_slot_find_room_in_a_pass() -> None:
    # 17 tokens are a block of 16 and one of a single token: 15 blocks of 120 tokens, padded to 128.
    policy_model = engine()
    said = await asyncio.gather(
        *(
            policy_model.generate([n] * (17 if n else 1), SAMPLING, session=f"s{n}")
            for n in range(8)
        )
    )
    assert all(len(c.token_ids) == 12 for c in said)


async def test_siblings_may_share_more_pages_than_there_are() -> None:
    # Nine each, eight of them shared: the pass after the first's names 63, and the pool has 20.
    decoder = small_decoder()
    policy_model = engine(decoder, memory_bytes=20 * page_bytes(decoder))
    said = await asyncio.gather(
        *(policy_model.generate([1] * 128 + [n], SAMPLING, session=f"s{n}") for n in range(8))
    )
    assert all(len(c.token_ids) == 12 for c in said)


def test_a_recording_that_failed_half_way_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
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

    reader = engine(max_num_batched_tokens=512)._reading
    monkeypatch.setattr(reader._recorder, "record", record)
    with pytest.raises(torch.OutOfMemoryError):
        reader._graph(64)
    room = 6
    assert len(reader._graph(64)(reader._static)) == 64
    assert recorded == [512, 384, 256, 128, 64, 32]


@pytest.mark.parametrize(("most_tokens", "largest"), [(100, 128), (128, 128), (8192, 8192)])
def test_passes_are_recorded_as_large_as_they_can_be(most_tokens: int, largest: int) -> None:
    policy_model = engine(max_num_batched_tokens=most_tokens)
    assert max(policy_model._reading._sizes) == largest


def test_a_pass_that_keeps_the_device_busy_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = speaker_weights(small_decoder())
    monkeypatch.setattr(reading, "_LAUNCHES_FLOPS", 2 * weights * 300)
    assert max(engine()._reading._sizes) == 256


def speaker_weights(decoder: Decoder) -> int:
    """Of one layer's seven projections."""
    layer = decoder.layers[0]
    return sum(m.weight.numel() for m in layer.modules() if isinstance(m, torch.nn.Linear))
