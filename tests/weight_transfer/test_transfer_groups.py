"""Weights sent in buckets to other processes arrive bit by bit, or both sides say what is wrong.

The receivers are real processes, started once for all cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.fakes.weight_receivers import (
    LORA,
    ReceiverCase,
    Receivers,
    SmallModel,
    open_receivers,
    sums,
)
from torch import Tensor, nn

from skyfleet.errors import EngineLostError, SentinelError
from skyfleet.models.lora import add_adapters, merge, merged_state_dict
from skyfleet.weight_transfer.sender import WeightSender
from skyfleet.weight_transfer.targets import named_adapters, sum_weights

BUCKET_BYTES = 8_000
"""Smaller than the embedding of the model, and several buckets in all."""


@pytest.fixture(scope="module")
def receivers() -> Iterator[Receivers]:
    with open_receivers(2) as opened:
        yield opened


def open_group(
    receivers: Receivers, case: ReceiverCase, *, n: int = 2, dtype: torch.dtype | None = None
) -> WeightSender:
    """A new group with the first `n` receivers, which then receive one sync."""
    sender = WeightSender(
        "127.0.0.1:0",
        world_size=n + 1,
        backend=case.backend,
        bucket_bytes=BUCKET_BYTES,
        dtype=dtype,
        timeout_seconds=case.timeout_seconds,
    )
    receivers.start(
        *(
            replace(case, address=sender.address, rank=rank, world_size=n + 1)
            for rank in range(1, n + 1)
        )
    )
    return sender


def temporary_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As a sharded learner gathers them: all in the same memory, one after another."""
    scratch = torch.empty(100_000)
    for name, weight in merged_state_dict(module).items():
        gathered = scratch[: weight.numel()].view(weight.shape)
        gathered.copy_(weight)
        yield name, gathered
        scratch.fill_(float("nan"))


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_every_receiver_holds_the_learners_weights_after_each_sync(
    receivers: Receivers, backend: str
) -> None:
    module, case = SmallModel(seed=1), ReceiverCase(backend=backend)
    sender = open_group(receivers, case)
    for version in (1, 2):
        if version == 2:
            receivers.start(*[replace(case, keeps_model=True)] * 2)
            with torch.no_grad():
                next(module.parameters()).add_(0.5)
        report = sender.send(temporary_weights(module), version=version)
        assert receivers.answers(2) == [sums(module)] * 2
    assert report.n_transfers >= 3
    # The tied head is announced, and its bytes are not sent again.
    whole = sum(weight.nbytes for weight in module.parameters())
    assert whole <= report.n_bytes < whole + 256 * len(module.state_dict())
    assert report.metrics["weight_sync/seconds_per_gb"] > 0
    sender.close()


def test_float32_masters_are_sent_and_verified_in_the_engines_dtype(receivers: Receivers) -> None:
    module = SmallModel(seed=1)
    case = ReceiverCase(model={"dtype": torch.bfloat16})
    sender = open_group(receivers, case, dtype=torch.bfloat16)
    report = sender.send(merged_state_dict(module).items(), version=1)
    rounded = sums(module.to(torch.bfloat16))
    assert receivers.answers(2) == [rounded, rounded]
    assert report.n_bytes < 1.2 * sum(weight.nbytes for weight in module.parameters())
    # A receiver that holds float32 gets the rounded values too.
    receivers.start(*[ReceiverCase()] * 2)
    sender.send(merged_state_dict(module).items(), version=2)
    assert receivers.answers(2) == [sums(module.float())] * 2
    sender.close()


def test_only_adapters_are_sent_to_receivers_that_merge_them(receivers: Receivers) -> None:
    module = SmallModel(seed=1)
    add_adapters(module, LORA, seed=5)
    with torch.no_grad():
        for name, weight in named_adapters(module):
            weight.normal_(generator=torch.Generator().manual_seed(len(name)))
    merge(module)
    sender = open_group(receivers, ReceiverCase(adapters=True, model={"seed": 1}))
    report = sender.send(named_adapters(module), version=1, computed=lambda: sum_weights(module))
    assert receivers.answers(2) == [sums(module)] * 2
    assert report.n_bytes < 0.6 * sum(w.nbytes for w in merged_state_dict(module).values())
    # With another base, adapters alone do not make it the learner's policy.
    receivers.start(*[ReceiverCase(adapters=True, model={"seed": 2})] * 2)
    with pytest.raises(SentinelError, match=r"engine rank 1: .* weights of the engine differ"):
        sender.send(named_adapters(module), version=2, computed=lambda: sum_weights(module))
    assert all("its base is not the learner's" in answer for answer in receivers.answers(2))
    sender.close()


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_models_that_differ_are_named_on_both_sides_and_the_group_stays_usable(
    receivers: Receivers, backend: str
) -> None:
    module, case = SmallModel(seed=1), ReceiverCase(backend=backend)
    weights = merged_state_dict(module)
    # An own head is tied to nothing: it gets the content of the embedding.
    untied = replace(case, model={"is_tied": False})
    sender = open_group(receivers, untied)
    sender.send(weights.items(), version=0)
    assert receivers.answers(2) == [sums(module)] * 2
    for changed, expected in (
        (replace(case, extra="bias"), "1 weights were not sent, such as bias"),
        (replace(case, without="model.norm.weight"), "model.norm.weight was sent, and the engine"),
        (replace(case, model={"vocab_size": 32}), r"embed_tokens.weight was sent with shape"),
    ):
        receivers.start(case, changed)
        with pytest.raises(SentinelError, match=f"engine rank 2: .*{expected}"):
            sender.send(weights.items(), version=1)
        good, bad = receivers.answers(2)
        assert good == sums(module)
        assert expected in bad
    sender.close()


def test_a_sender_that_fails_ends_the_wait_of_its_receivers(receivers: Receivers) -> None:
    def fail_later() -> Iterator[tuple[str, Tensor]]:
        yield from list(merged_state_dict(SmallModel(seed=1)).items())[:5]
        raise RuntimeError("a rank of the learner is gone")

    for backend in ("gloo", "ipc"):
        sender = open_group(receivers, ReceiverCase(backend=backend, timeout_seconds=600))
        with pytest.raises(RuntimeError, match=r"^a rank of the learner is gone$"):
            sender.send(fail_later(), version=1)
        assert all("ModelError: weight sync" in answer for answer in receivers.answers(2))
        with pytest.raises(EngineLostError, match="a weight transfer failed before"):
            sender.send((), version=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_a_receiver_that_hangs_is_named_within_the_deadline(
    receivers: Receivers, backend: str
) -> None:
    case = ReceiverCase(backend=backend, timeout_seconds=10)
    sender = open_group(receivers, case)
    weights = merged_state_dict(SmallModel(seed=1))
    sender.send(weights.items(), version=1)
    receivers.answers(2)
    receivers.start(case, case)
    receivers.stop(1)
    with pytest.raises(EngineLostError, match=r"version 2: engine ranks \[2\] did not take"):
        sender.send(weights.items(), version=2)
    receivers.resume(1)
    receivers.answers(2)


def test_a_receiver_that_dies_is_named_and_the_others_get_a_new_group(receivers: Receivers) -> None:
    """The last case: afterwards one receiver is left."""
    module = SmallModel(seed=1)
    weights = merged_state_dict(module)
    sender = open_group(receivers, ReceiverCase())
    sender.send(weights.items(), version=1)
    assert receivers.answers(2) == [sums(module)] * 2
    receivers.start(ReceiverCase())
    receivers.kill(1)
    with pytest.raises(EngineLostError, match=r"version 2: engine ranks \[2\] did not take"):
        sender.send(weights.items(), version=2)
    (answer,) = receivers.answers(1)
    assert "ModelError: weight sync: the learner's weights did not arrive" in answer
    sender = open_group(receivers, ReceiverCase(), n=1)
    sender.send(weights.items(), version=3)
    assert receivers.answers(1) == [sums(module)]
