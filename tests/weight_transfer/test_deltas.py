"""A receiver that follows, misses, starts late or meets damage reaches the learner's bits, or says why."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.buckets import serve_s3, use_bucket
from tests.fakes.weight_receivers import SmallModel, sums
from torch import Tensor, nn

from skyfleet.errors import ModelError
from skyfleet.models.lora import merged_state_dict
from skyfleet.models.weights import weight_checksum
from skyfleet.storage.objects import list_objects
from skyfleet.weight_transfer import delta_publisher
from skyfleet.weight_transfer.delta_publisher import DeltaPublisher
from skyfleet.weight_transfer.delta_receiver import DeltaReceiver


def change(module: nn.Module, name: str = "model.layers.0.up_proj.weight", at: int = 0) -> None:
    with torch.no_grad():
        module.get_parameter(name).view(-1)[at] += 1.0


def received(receiver: DeltaReceiver) -> dict[str, list[int]]:
    return {name: weight_checksum(weight).tolist() for name, weight in receiver.named_weights()}


def publish(publisher: DeltaPublisher, module: nn.Module, version: int) -> int:
    return publisher.publish(merged_state_dict(module).items(), version=version).n_bytes


def test_a_delta_holds_what_changed_and_a_late_receiver_reaches_the_same_bits(
    tmp_path: Path,
) -> None:
    module, publisher = SmallModel(seed=1), DeltaPublisher(str(tmp_path))
    follower, late = DeltaReceiver(str(tmp_path)), DeltaReceiver(str(tmp_path))
    whole = publish(publisher, module, 3)
    assert follower.fetch().n_bytes == whole
    assert received(follower) == sums(module)
    for version in (4, 7):
        change(module, at=version)
        small = publish(publisher, module, version)
        assert small < whole / 50
        assert follower.fetch(version).n_bytes == small
        assert received(follower) == sums(module)
    payloads = load_file(tmp_path / "delta-00000007" / "part-0000.safetensors")
    assert payloads.keys() == {"model.layers.0.up_proj.weight"}
    assert follower.fetch(7).n_bytes == 0
    late.fetch(7)
    assert received(late) == sums(module)
    assert {name for name, _ in late.named_weights(with_aliases=False)} == sums(module).keys() - {
        "lm_head.weight"
    }


def test_weights_are_rounded_to_the_engines_dtype(tmp_path: Path) -> None:
    module = SmallModel(seed=1)
    publisher = DeltaPublisher(str(tmp_path), dtype=torch.bfloat16)
    publish(publisher, module, 0)
    receiver = DeltaReceiver(str(tmp_path))
    receiver.fetch(0)
    assert received(receiver) == sums(SmallModel(seed=1, dtype=torch.bfloat16))
    with torch.no_grad():  # below the precision of bfloat16
        module.get_parameter("model.norm.weight").mul_(1 + 1e-6)
    assert publish(publisher, module, 1) == 0
    receiver.fetch(1)
    assert receiver.version == 1


def test_receivers_that_fetch_at_any_time_are_exact_while_chains_are_renewed_and_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_publisher, "MAX_DELTAS", 3)
    drawn, module = random.Random(0), SmallModel(seed=1)
    publisher = DeltaPublisher(str(tmp_path), max_file_bytes=4_000)
    receivers = [DeltaReceiver(str(tmp_path)) for _ in range(4)]
    folders: set[str] = set()
    for version in range(18):
        if version == 11:  # the trainer is started again, without what the last one knew
            publisher = DeltaPublisher(str(tmp_path), max_file_bytes=4_000)
        change(module, at=version)
        publish(publisher, module, version)
        for receiver in receivers:
            if drawn.random() < 0.4:
                receiver.fetch(version)
                assert received(receiver) == sums(module)
        folders = {path.name for path in tmp_path.iterdir()}
        assert len(folders) <= 12
    # Two snapshots and what follows the older one.
    assert sorted(folders)[-2:] == ["full-00000014", "full-00000017"]
    assert min(folders) == "delta-00000015"


def damage_payload(folder: Path) -> None:
    path = folder / "part-0000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def remove_part(folder: Path) -> None:
    (folder / "part-0000.safetensors").unlink()


def change_checksum(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["weights"]["model.norm.weight"]["checksum"][3] += 1
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_payload, "is not what its manifest says"),
        (remove_manifest, "no snapshot and no chain of deltas"),
        (remove_part, "is missing"),
        (change_checksum, "differs after the update"),
    ],
)
def test_damage_is_named_and_a_later_snapshot_repairs_it(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    module, publisher = SmallModel(seed=1), DeltaPublisher(str(tmp_path))
    receiver = DeltaReceiver(str(tmp_path), timeout_seconds=0)
    publish(publisher, module, 1)
    receiver.fetch(1)
    change(module)
    publish(publisher, module, 2)
    damage(tmp_path / "delta-00000002")
    with pytest.raises(ModelError, match=f"sync_dir='.*version 2 of the weights.*{reason}"):
        receiver.fetch(2)
    publish(DeltaPublisher(str(tmp_path)), module, 2)
    receiver.fetch(2)
    assert received(receiver) == sums(module)


def test_a_version_that_was_not_written_whole_does_not_count(tmp_path: Path) -> None:
    module, publisher = SmallModel(seed=1), DeltaPublisher(str(tmp_path))
    publish(publisher, module, 1)

    def fail_later() -> object:
        change(module)
        yield from list(merged_state_dict(module).items())[:3]
        raise MemoryError

    with pytest.raises(MemoryError):
        publisher.publish(fail_later(), version=2)  # type: ignore[arg-type]
    receiver = DeltaReceiver(str(tmp_path), timeout_seconds=0)
    receiver.fetch()
    assert receiver.version == 1
    # What the failed version had compared is not the base of the next one.
    publish(publisher, module, 3)
    receiver.fetch(3)
    assert received(receiver) == sums(module)


def test_a_chain_lives_in_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    module: nn.Module = SmallModel(seed=1)
    with serve_s3() as endpoint:
        address = f"{use_bucket(monkeypatch, endpoint, 'weights')}/run"
        publisher = DeltaPublisher(address, max_file_bytes=20_000)
        receiver = DeltaReceiver(address)
        for version in (0, 1):
            change(module, at=version)
            publish(publisher, module, version)
            receiver.fetch(version)
            assert received(receiver) == sums(module)
        DeltaPublisher(address).publish(merged_state_dict(module).items(), version=2)
        names = {info.name.partition("/")[0] for info in list_objects(address)}
        assert names == {"full-00000002"}
        receiver.fetch(2)
        assert received(receiver) == sums(module)


def test_tied_weights_may_become_two_and_one_again(tmp_path: Path) -> None:
    tied = SmallModel(seed=1)
    untied = SmallModel(seed=1, is_tied=False)
    publisher, receiver = DeltaPublisher(str(tmp_path)), DeltaReceiver(str(tmp_path))
    states: list[dict[str, Tensor]] = [merged_state_dict(m) for m in (tied, untied, tied)]
    for version, state in enumerate(states):
        publisher.publish(state.items(), version=version)
        receiver.fetch(version)
        assert received(receiver) == {k: weight_checksum(w).tolist() for k, w in state.items()}
