"""What no engine can continue is refused to its own session, and the others speak on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.fakes.small_models import VOCABULARY, small_decoder

from skyfleet.chat.transcript import Completion
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.http_client import RefusedError
from skyfleet.engines.sampling_params import SamplingParams

SAMPLING = SamplingParams(max_generate_length=4, seed=1)


@pytest.mark.parametrize("make", [EmbeddedEngine, CudaEngine])
@pytest.mark.parametrize("foreign", [999_999, VOCABULARY, -1])
async def test_a_foreign_token_id_fails_its_own_session_alone(
    make: Callable[..., EmbeddedEngine | CudaEngine], foreign: int
) -> None:
    policy_model = make(small_decoder(), decode_text=str, max_num_seqs=4, capacity=64)
    said, refused = await asyncio.gather(
        policy_model.generate([5, VOCABULARY - 1, 0], SAMPLING, session="s"),
        policy_model.generate([5, foreign], SAMPLING, session="t"),
        return_exceptions=True,
    )
    assert isinstance(said, Completion)
    assert isinstance(refused, RefusedError)
    assert f"holds token {foreign}, and the model's are 0 to {VOCABULARY - 1}" in str(refused)
