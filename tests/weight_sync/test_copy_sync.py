"""An engine with weights of its own gets exactly the learner's weights, or the sync fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.engines.test_embedded_engine import PROMPT, SAMPLING, engine
from tests.fakes.samples import random_groups
from tests.fakes.small_models import small_decoder
from tests.learner.test_lora_learner import FAST, adapted
from tests.learner.test_single_device_learner import learner, on_policy
from torch import Tensor

from skyfleet.errors import SentinelError
from skyfleet.models.decoder import Decoder
from skyfleet.weight_sync.sync import CopySync


@pytest.mark.parametrize("make", [adapted, lambda: small_decoder(seed=1)], ids=["lora", "full"])
async def test_a_copy_samples_the_learners_tokens_after_each_sync_and_not_before(make) -> None:  # type: ignore[no-untyped-def]
    decoder: Decoder = make()
    student, shared = learner(decoder, FAST), engine(decoder)
    copied = small_decoder(seed=1)
    separate, sync = engine(copied), CopySync(copied.module)
    for _ in range(2):
        await student.step(on_policy(decoder, random_groups(2)))
    stale = await separate.generate(PROMPT, SAMPLING, session="s")
    shared.policy_version = student.policy_version
    expected = await shared.generate(PROMPT, SAMPLING, session="s")
    assert stale.logprobs != expected.logprobs
    assert await sync.push(student, [separate]) == student.policy_version == 2
    assert await separate.generate(PROMPT, SAMPLING, session="s") == expected


async def test_a_weight_that_was_not_sent_stops_the_run() -> None:
    student, copied = learner(small_decoder(seed=1)), small_decoder(seed=1)
    whole = dict(student.named_weights())

    def forget_one() -> Iterator[tuple[str, Tensor]]:
        yield from list(whole.items())[1:]

    student.named_weights = forget_one  # type: ignore[method-assign]
    with pytest.raises(SentinelError, match=r"1 weights were not sent, such as .*embed_tokens"):
        await CopySync(copied.module).push(student, [])
