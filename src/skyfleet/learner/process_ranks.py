"""ProcessRanks: the ranks of a sharded learner, over torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from skyfleet.algorithms.sample import Sample
from skyfleet.learner.ranks import Ranks, divide_samples
from skyfleet.models.sequence_parallel import SequenceParallel
from skyfleet.models.sharding import ShardingPlan, gather
from skyfleet.models.tensor_parallel import Split, TensorParallel

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """How many ranks each kind of parallelism has; the last changes fastest from rank to rank."""

    replicas: int = 1
    """Of hybrid sharding: each holds all weights."""
    shards: int = 1
    """Ranks that divide the weights and the samples."""
    sequence: int = 1
    """Ranks that divide the tokens of their samples; they divide the weights too."""
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return prod(self.dimensions)

    @property
    def dimensions(self) -> tuple[int, int, int, int]:
        return self.replicas, self.shards, self.sequence, self.tensor


class ProcessRanks(Ranks):
    is_sharded = True

    def __init__(
        self, layout: RankLayout, *, device_type: str, timeout_seconds: float = 1800.0
    ) -> None:
        """Every rank of the default process group makes one; `world_size` must be the layout's."""
        self._device_type, self._timeout = device_type, timedelta(seconds=timeout_seconds)
        index = torch.arange(layout.world_size).view(layout.dimensions)
        rank = dist.get_rank()
        # Objects travel on the CPU, and so never wait for a GPU.
        self._data = self._new_group(
            index.permute(2, 3, 0, 1).reshape(-1, layout.replicas * layout.shards), "gloo"
        )
        self.size, self.rank = dist.get_world_size(self._data), dist.get_rank(self._data)
        self._replicated = self._new_group(index.permute(3, 0, 1, 2).reshape(layout.tensor, -1))
        self.tensor = self.sequence = None
        if layout.tensor > 1:
            self.tensor = TensorParallel(self._new_group(index.reshape(-1, layout.tensor)))
        if layout.sequence > 1:
            self.sequence = SequenceParallel(
                self._new_group(index.permute(0, 1, 3, 2).reshape(-1, layout.sequence))
            )
        self.n_tensor_ranks = layout.tensor
        self._all = self._new_group(index.reshape(1, -1), "gloo")
        self.dcp = {"process_group": self._all}
        self.mesh = self._make_mesh(layout)
        self._splits: dict[int, Split] = {}
        self.is_first = rank == 0

    def plan(
        self, *, cpu_offload: bool = False, reshard_after_forward: bool = True
    ) -> ShardingPlan:
        return ShardingPlan(
            mesh=self.mesh,
            tensor=self.tensor,
            sequence=self.sequence,
            cpu_offload=cpu_offload,
            reshard_after_forward=reshard_after_forward,
        )

    @torch.no_grad()
    def whole_weights(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, weight in module.state_dict(keep_vars=True).items():
            if not name.endswith((".lora_A", ".lora_B")):
                yield name, self.gather_parameter(weight)

    @torch.no_grad()
    def gather_parameter(self, parameter: nn.Parameter) -> Tensor:
        split = self._splits.get(id(parameter), Split.WHOLE)
        return gather(parameter.detach(), split, self.plan())

    def register(self, module: nn.Module, splits: Mapping[str, Split]) -> None:
        """How tensor parallelism divides the parameters of a sharded module."""
        for name, parameter in module.named_parameters():
            self._splits[id(parameter)] = splits.get(name, Split.WHOLE)

    def share(self, samples: Sequence[Sample]) -> Sequence[int]:
        return divide_samples(samples, self.size)[self.rank]

    def gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        file = BytesIO()
        torch.save(value, file)
        parts: list[bytes] = [b""] * self.size
        dist.all_gather_object(parts, file.getvalue(), group=self._data)
        # Tensors of the other ranks' GPUs come to this rank's.
        here = (
            torch.device(self._device_type, torch.cuda.current_device())
            if self._device_type == "cuda"
            else "cpu"
        )
        return [torch.load(BytesIO(part), map_location=here, weights_only=False) for part in parts]

    def wait(self) -> None:
        dist.barrier(group=self._all)

    def shard_key(self, name: str) -> str:
        if self.tensor is None:
            return name
        return f"{name}@{self.tensor.rank}"

    def as_shard(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return local
        # Not `from_local`, which copies a shard on the CPU to the mesh of the GPUs.
        spec: Any = parameter
        return DTensor(local, spec._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def keep_part(self, parameter: nn.Parameter, local: Tensor, whole: Tensor) -> None:
        split = self._splits.get(id(parameter), Split.WHOLE)
        part = whole if self.tensor is None else self.tensor.keep(whole, split)
        if isinstance(parameter, DTensor):
            rows = -(-parameter.shape[0] // parameter.device_mesh.size(-1))
            first = rows * parameter.device_mesh.get_local_rank(-1)
            part = part[first : first + len(local)]
        local.copy_(part)

    def largest(self, number: int) -> int:
        highest = torch.tensor(number)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._data)
        return int(highest)

    def local(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        shard: Any = tensor.detach()
        local: Tensor = shard.to_local()
        return local

    @torch.no_grad()
    def whole_gradients(
        self, named: Iterable[tuple[str, nn.Parameter]]
    ) -> Iterator[tuple[str, nn.Parameter]]:
        plan = self.plan()
        for name, parameter in named:
            if parameter.grad is None:
                continue
            split = self._splits.get(id(parameter), Split.WHOLE)
            whole = nn.Parameter(gather(parameter.detach(), split, plan))
            whole.grad = gather(parameter.grad, split, plan)
            yield name, whole

    @torch.no_grad()
    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> float:
        squares: dict[str, list[Tensor]] = {"whole": [], "sharded": [], "divided": []}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            kind = "whole"
            if isinstance(parameter, DTensor):
                split = self._splits[id(parameter)]
                kind = "divided" if split in (Split.ROWS, Split.COLUMNS) else "sharded"
            norm_of_part = torch.linalg.vector_norm(self.local(parameter.grad), dtype=torch.float32)
            squares[kind].append(norm_of_part.square())
        whole, *parts = (_sum(terms).to(self._device_type) for terms in squares.values())
        totals = torch.stack(parts)
        dist.all_reduce(totals, group=self.mesh.get_group(self.mesh.mesh_dim_names[-1]))  # type: ignore[index]
        if self.tensor is not None:
            dist.all_reduce(totals[1:], group=self.tensor.group)
        norm = float((totals.sum() + whole).sqrt())
        # As torch's clip_grad_norm_: also a norm that is not finite scales.
        scale = limit / (norm + 1e-6)
        if not scale >= 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    self.local(parameter.grad).mul_(scale)
        return norm

    @torch.no_grad()
    def complete_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """FSDP sums neither those of unsharded parameters nor the partial ones of a tensor group."""
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad, group=self._replicated)
            elif self.tensor is not None and self._splits[id(parameter)] is Split.PARTIAL:
                gradient = self.local(parameter.grad)
                total = gradient.to(self._device_type)
                dist.all_reduce(total, group=self.tensor.group)
                gradient.copy_(total)

    def _make_mesh(self, layout: RankLayout) -> DeviceMesh:
        shape = (layout.replicas, layout.shards * layout.sequence, layout.tensor)
        names = ("replicate", "shard", "tensor")
        whole = init_device_mesh(self._device_type, shape, mesh_dim_names=names)
        return whole["replicate", "shard"] if layout.replicas > 1 else whole["shard"]

    def _new_group(self, rows: Tensor, backend: str | None = None) -> dist.ProcessGroup:
        """The group of this rank's row; every rank makes all of them."""
        own: dist.ProcessGroup | None = None
        for ranks in rows.tolist():
            group = dist.new_group(ranks, timeout=self._timeout, backend=backend)
            if dist.get_rank() in ranks:
                own = group
        assert own is not None
        return own


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum() if terms else torch.zeros(())
