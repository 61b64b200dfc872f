"""An invalid request fails its own session only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.fakes.small_models import VOCABULARY, small_decoder

from skyfleet.chat.transcript import Completion
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.sampling_params import SamplingParams

SAMPLING = SamplingParams(max_generate_length=4, seed=1)


@pytest.mark.parametrize("make", [EmbeddedEngine, CudaEngine])
@pytest.mark.parametrize("invalid", [999_999, VOCABULARY, -1])
async def test_an_invalid_token_id_fails_its_own_session_only(
    make: Callable[..., EmbeddedEngine | CudaEngine], invalid: int
) -> None:
    policy_model = make(small_decoder(), decode_text=str, max_num_seqs=4, capacity=64)
    completion, error = await asyncio.gather(
        policy_model.generate([5, VOCABULARY - 1, 0], SAMPLING, session="s"),
        policy_model.generate([5, invalid], SAMPLING, session="t"),
        return_exceptions=True,
    )
    assert isinstance(completion, Completion)
    assert isinstance(error, RequestRejectedError)
    assert f"token {invalid} is outside the model's vocabulary (0 to {VOCABULARY - 1})" in str(
        error
    )
