"""Weights to an engine in another process on one GPU: seconds and seconds per GB, by way.

The receiver has weights of its own, copies what arrives into them, and compares the checksums of what
it then holds with the sender's; its weights are zeroed between transfers, and the sender's change. Ways:
buckets by CUDA IPC (`WeightSender` with backend ipc) by bucket size; torch's own CUDA IPC, with one
message per tensor and with one for all; a safetensors file in /dev/shm; gloo, through the host.
Weights are random. `python -m benchmarks.gpu_weight_transfer`; on a CPU, where IPC is shared memory:
`--device cpu --shape tiny`. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from skyfleet.models.weights import weight_checksum
from skyfleet.weight_transfer.receiver import WeightReceiver
from skyfleet.weight_transfer.sender import WeightSender
from skyfleet.weight_transfer.targets import ModuleWeights, compare_checksums

BUCKET_GB = (0.064, 0.25, 1.0, 4.0)
SHARED_MEMORY = Path("/dev/shm")
ANSWER_SECONDS = 60.0
N_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    vocab: int
    hidden: int
    mlp: int
    layers: int
    queries: int
    """Width of all query heads; keys and values below."""
    keys: int
    head_dim: int = 0
    """Of the norms of queries and keys; 0 without."""
    is_tied: bool = False


SHAPES = {
    "qwen3-8b": Shape(
        vocab=151_936, hidden=4096, mlp=12_288, layers=36, queries=4096, keys=1024, head_dim=128
    ),
    "smollm2": Shape(
        vocab=49_152, hidden=576, mlp=1536, layers=30, queries=576, keys=192, is_tied=True
    ),
    "tiny": Shape(vocab=512, hidden=64, mlp=128, layers=3, queries=64, keys=32, head_dim=16),
}


def list_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", (shape.queries, shape.hidden)
        yield f"{layer}.self_attn.k_proj.weight", (shape.keys, shape.hidden)
        yield f"{layer}.self_attn.v_proj.weight", (shape.keys, shape.hidden)
        yield f"{layer}.self_attn.o_proj.weight", (shape.hidden, shape.queries)
        if shape.head_dim:
            yield f"{layer}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{layer}.mlp.gate_proj.weight", (shape.mlp, shape.hidden)
        yield f"{layer}.mlp.up_proj.weight", (shape.mlp, shape.hidden)
        yield f"{layer}.mlp.down_proj.weight", (shape.hidden, shape.mlp)
        yield f"{layer}.input_layernorm.weight", (shape.hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (shape.hidden,)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.is_tied:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def allocate(name: str, device: torch.device) -> dict[str, Tensor]:
    return {
        weight: torch.zeros(size, dtype=torch.bfloat16, device=device)
        for weight, size in list_shapes(SHAPES[name])
    }


def sums_of(weights: Mapping[str, Tensor]) -> dict[str, list[int]]:
    rows = torch.stack([weight_checksum(weight) for weight in weights.values()]).tolist()
    return dict(zip(weights, rows, strict=True))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Receiver:
    """What the receiver's process does; one method per command."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Tensor] = {}
        self._receiver: WeightReceiver | None = None

    def model(self, name: str) -> None:
        self._held = {}
        self._held = allocate(name, self._device)

    def zero(self) -> None:
        for weight in self._held.values():
            weight.zero_()

    def join(self, address: str, backend: Any) -> None:
        self._receiver = WeightReceiver(
            address,
            rank=1,
            world_size=2,
            backend=backend,
            device=self._device,
            timeout_seconds=ANSWER_SECONDS,
        )

    def buckets(self) -> None:
        assert self._receiver is not None
        self._receiver.receive(ModuleWeights(self._held))

    def tensors(
        self, arrived: Sequence[tuple[str, Tensor]], expected: Mapping[str, list[int]]
    ) -> None:
        for name, weight in arrived:
            self._held[name].copy_(weight)
        compare_checksums(self._held, expected)

    def file(self, path: str, expected: Mapping[str, list[int]]) -> None:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                self._held[name].copy_(file.get_tensor(name))
        compare_checksums(self._held, expected)

    def sums(self) -> dict[str, list[int]]:
        return sums_of(self._held)


@torch.no_grad()
def serve(pipe: Connection, device_name: str) -> None:
    torch.set_num_threads(1)
    mp.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    receiver = Receiver(torch.device(device_name))
    while (command := pipe.recv()) is not None:
        name, arguments = command
        try:
            answer = getattr(receiver, name)(*arguments)
            wait_for(torch.device(device_name))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        del command, arguments  # tensors of the sender
        pipe.send(answer)


class ReceiverProcess:
    def __init__(self, device: torch.device) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, str(device)), daemon=True)
        self._process.start()

    def start(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_SECONDS):
            raise RuntimeError(f"the receiver did not answer within {ANSWER_SECONDS:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def ask(self, name: str, *arguments: Any) -> Any:
        self.start(name, *arguments)
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    receiver: ReceiverProcess
    device: torch.device
    weights: dict[str, Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    def measure(self, transfer: Callable[[int], object], repeats: int) -> dict[str, Any]:
        """The first of several transfers is not counted."""
        seconds: list[float] = []
        for i in range(repeats + (repeats > 1)):
            self.receiver.ask("zero")
            for weight in list(self.weights.values())[:3]:
                weight.add_(0.25)
            wait_for(self.device)
            start = perf_counter()
            transfer(i)
            seconds.append(perf_counter() - start)
        if self.receiver.ask("sums") != sums_of(self.weights):
            raise RuntimeError("the receiver holds other weights")
        return describe(seconds, self.n_bytes)

    def send_buckets(self, backend: Any, bucket_gb: float, repeats: int) -> dict[str, Any]:
        sender = WeightSender(
            "127.0.0.1:0",
            world_size=2,
            backend=backend,
            device=self.device,
            bucket_bytes=int(bucket_gb * 1e9),
            timeout_seconds=ANSWER_SECONDS,
        )
        self.receiver.ask("join", sender.address, backend)

        def transfer(version: int) -> None:
            self.receiver.start("buckets")
            sender.send(self.weights.items(), version=version)
            self.receiver.answer()

        row = self.measure(transfer, repeats)
        sender.close()
        return row

    def send_tensors(self, repeats: int) -> dict[str, Any]:
        def transfer(_: int) -> None:
            for name, weight in self.weights.items():
                sums = {name: weight_checksum(weight).tolist()}
                self.receiver.ask("tensors", [(name, weight)], sums)

        return self.measure(transfer, repeats)

    def send_handles(self, repeats: int) -> dict[str, Any]:
        def transfer(_: int) -> None:
            self.receiver.ask("tensors", list(self.weights.items()), sums_of(self.weights))

        return self.measure(transfer, repeats)

    def send_file(self, repeats: int) -> dict[str, Any]:
        if shutil.disk_usage(SHARED_MEMORY).free < 1.1 * self.n_bytes:
            raise RuntimeError(f"{SHARED_MEMORY} has no room for {self.n_bytes / 1e9:.1f} GB")
        with tempfile.TemporaryDirectory(prefix="skyfleet-", dir=SHARED_MEMORY) as folder:
            path = f"{folder}/weights.safetensors"

            def transfer(_: int) -> None:
                save_file(self.weights, path)
                self.receiver.ask("file", path, sums_of(self.weights))

            return self.measure(transfer, repeats)

    def sum_weights(self) -> dict[str, Any]:
        seconds = []
        for _ in range(N_REPEATS + 1):
            wait_for(self.device)
            start = perf_counter()
            sums_of(self.weights)
            seconds.append(perf_counter() - start)
        return describe(seconds, self.n_bytes)

    def ways(self, slow: int) -> dict[str, Callable[[], dict[str, Any]]]:
        """`slow` repeats of the ways through the host."""
        return {
            "checksums alone, of one side": self.sum_weights,
            **{
                f"ipc, buckets of {gb:g} GB": partial(self.send_buckets, "ipc", gb, N_REPEATS)
                for gb in BUCKET_GB
            },
            "torch IPC, one message for all": partial(self.send_handles, N_REPEATS),
            "torch IPC, one message per tensor": partial(self.send_tensors, N_REPEATS),
            "safetensors file in /dev/shm": partial(self.send_file, slow),
            "gloo, buckets of 1 GB": partial(self.send_buckets, "gloo", 1.0, slow),
        }


def describe(seconds: Sequence[float], n_bytes: int) -> dict[str, Any]:
    kept = median(seconds[1:] or seconds)
    return {
        "seconds": round(kept, 4),
        "seconds_per_gb": round(kept * 1e9 / n_bytes, 4),
        "gb": round(n_bytes / 1e9, 3),
        "first_seconds": round(seconds[0], 4),
        "n": len(seconds[1:] or seconds),
    }


@torch.no_grad()
def measure_shape(name: str, device: torch.device) -> list[dict[str, Any]]:
    """A way that fails is reported, and the next one gets a new receiver."""
    weights = allocate(name, device)
    for i, weight in enumerate(weights.values()):
        weight.normal_(generator=torch.Generator(device).manual_seed(i))
    rows: list[dict[str, Any]] = []
    bench = Bench(receiver=ReceiverProcess(device), device=device, weights=weights)
    bench.receiver.ask("model", name)
    slow = 1 if name == "qwen3-8b" else N_REPEATS
    for way in bench.ways(slow):
        try:
            row = bench.ways(slow)[way]()
            text = (
                f"{row['seconds']:8.4f} s {row['seconds_per_gb']:8.4f} s/GB, "
                f"first {row['first_seconds']:.4f} s"
            )
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            row = {"error": text}
            bench.receiver.close()
            bench = replace(bench, receiver=ReceiverProcess(device))
            bench.receiver.ask("model", name)
        print(f"{name:9} {bench.n_bytes / 1e9:7.3f} GB  {way:36} {text}", flush=True)
        rows.append({"shape": name, "way": way, **row})
    bench.receiver.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    names = ["smollm2", "qwen3-8b"] if arguments.shape == "both" else [arguments.shape]
    mp.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    start = perf_counter()
    rows = [row for name in names for row in measure_shape(name, device)]
    is_cuda = device.type == "cuda"
    about = {
        "benchmark": "gpu_weight_transfer",
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "torch": torch.__version__,
        "seconds": round(perf_counter() - start, 1),
        "sender_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if is_cuda else None,
    }
    print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
