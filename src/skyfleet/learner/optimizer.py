"""AdamW with learning-rate schedules, gradient clipping and CPU offload."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from skyfleet.learner.ranks import ONE_RANK, Ranks

Schedule = Callable[[int], float]


def constant_with_warmup(step: int, *, num_warmup_steps: int = 0) -> float:
    """Rise linearly to 1, then stay. The first step has a rate above 0."""
    return min(1.0, (step + 1) / (num_warmup_steps + 1))


def linear(step: int, *, num_warmup_steps: int, total_steps: int) -> float:
    """Fall linearly after the warm-up, to 0 one step after the last."""
    warm = constant_with_warmup(step, num_warmup_steps=num_warmup_steps)
    return warm * (1 - _progress(step, num_warmup_steps, total_steps))


def cosine(step: int, *, num_warmup_steps: int, total_steps: int) -> float:
    """Fall along half a cosine after the warm-up."""
    warm = constant_with_warmup(step, num_warmup_steps=num_warmup_steps)
    return warm * (1 + cos(pi * _progress(step, num_warmup_steps, total_steps))) / 2


def linear_to_a_tenth(step: int, *, num_warmup_steps: int, total_steps: int) -> float:
    """Fall from the first step to a tenth; the schedule of the warm start."""
    warm = constant_with_warmup(step, num_warmup_steps=num_warmup_steps)
    return warm * max(0.1, 1 - 0.9 * step / total_steps)


def build_lr_schedule(name: str, *, num_warmup_steps: int, total_steps: int) -> Schedule:
    """`total_steps` is the number of optimizer steps of the run."""
    if name == "constant_with_warmup":
        return partial(constant_with_warmup, num_warmup_steps=num_warmup_steps)
    falling = {"linear": linear, "cosine": cosine}[name]
    return partial(falling, num_warmup_steps=num_warmup_steps, total_steps=total_steps)


def _progress(step: int, num_warmup_steps: int, total_steps: int) -> float:
    """From 0 at the end of the warm-up to 1."""
    return min(max(0, step - num_warmup_steps) / max(1, total_steps - num_warmup_steps), 1.0)


CPU = torch.device("cpu")
_MOMENTS = ("exp_avg", "exp_avg_sq")


class CPUOffloaded:
    """A frozen model whose weights are on the CPU except inside `on_device`.

    It frees and reallocates the storage under the tensors, which stay the same objects, so that
    views of a weight remain valid.
    """

    def __init__(self, module: nn.Module, *, beside: nn.Module) -> None:
        """Weights shared with the module `beside` are not offloaded."""
        shared = _storages(beside)
        own = _storages(module)
        self._storages = [own[at] for at in own if at not in shared and own[at].resizable()]
        self._copies = [_copy(storage) for storage in self._storages]
        self._free()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        # Blocking copies: with asynchronous ones, weights were read before they arrived.
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        try:
            yield
        finally:
            self._free()

    def _free(self) -> None:
        for storage in self._storages:
            storage.resize_(0)


def _copy(storage: UntypedStorage) -> UntypedStorage:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    copy.copy_(storage)
    return copy


def _storages(module: nn.Module) -> dict[int, UntypedStorage]:
    """By address: tied and joined weights share one storage."""
    tensors = chain(module.parameters(), module.buffers())
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    lr: float
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    """Clips gradients to this global norm; 0 or less does not clip."""
    schedule: Schedule = constant_with_warmup
    offload_after_step: bool = False
    """Keep moments and float32 copies on the CPU between steps."""


class Optimizer:
    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        settings: OptimizerSettings,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """A sharded parameter is updated by its ranks, each of which has the state of its part."""
        self._parameters = [p for p in parameters if p.requires_grad]
        self._settings, self._ranks = settings, ranks
        self._weights: list[Tensor] = [ranks.local(p) for p in self._parameters]
        # An update of 1e-6 vanishes in a bfloat16 weight, so float32 copies are updated.
        self._masters: list[Tensor] = [
            w if w.dtype == torch.float32 else w.detach().float() for w in self._weights
        ]
        for parameter in self._parameters:
            # Gradients of micro-batches accumulate in float32.
            parameter.grad_dtype = torch.float32
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=settings.lr,
            betas=settings.adam_betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._steps = 0
        self._offload()

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._settings.lr * self._settings.schedule(self._steps)

    def complete_gradients(self) -> None:
        """Once per step, after its backward passes."""
        self._ranks.complete_gradients(self._parameters)

    def apply(self) -> float:
        """Take one step with the accumulated gradients, clear them and return their norm.

        With a norm that is not finite, weights, moments and schedule do not change.
        """
        limit = self._settings.max_grad_norm
        norm = self._ranks.clip(self._parameters, limit if limit > 0 else math.inf)
        if math.isfinite(norm):
            if self._settings.offload_after_step:
                self.move_to(self._weights[0].device)
            for group in self._adam.param_groups:
                group["lr"] = self.lr
            self._step()
            self._steps += 1
            self._offload()
        for parameter in self._parameters:
            parameter.grad = None
        return norm

    def state_dict(self) -> dict[str, Any]:
        low_precision = any(w is not m for w, m in zip(self._weights, self._masters, strict=True))
        masters = self._masters if low_precision else []
        return {"adam": self._adam.state_dict(), "steps": self._steps, "masters": masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state["adam"])
        self._steps = state["steps"]
        for master, saved in zip(self._masters, state["masters"], strict=False):
            master.copy_(saved)
        self._offload()

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those that are trained."""
        return self._parameters

    @property
    def steps(self) -> int:
        return self._steps

    def list_tensors(self) -> Iterator[tuple[int, str, Tensor]]:
        """By the index of each parameter: its float32 weight and its moments, to save or to fill."""
        for index, master in enumerate(self._masters):
            yield index, "weight", master
            for name in _MOMENTS:
                if name in self._adam.state.get(master, {}):
                    yield index, name, self._adam.state[master][name]

    def reset(self, steps: int) -> None:
        """Moments of zeros after so many steps; what `list_tensors` yields is then overwritten."""
        self._steps = steps
        self._adam.state.clear()
        for master in self._masters if steps else ():
            step = torch.tensor(float(steps), device=master.device)
            moments = {name: torch.zeros_like(master, requires_grad=False) for name in _MOMENTS}
            self._adam.state[master] = {"step": step, **moments}

    @torch.no_grad()
    def finish_loading(self) -> None:
        """The float32 weights were overwritten: so are the weights that are copies of them."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            if master is not weight:
                weight.copy_(master)
        self._offload()

    def move_to(self, device: torch.device) -> None:
        """Move moments and float32 copies to `device`; the weights stay."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            if master is not weight:
                master.data = master.data.to(device)
        for state in self._adam.state.values():
            for name, value in state.items():
                state[name] = value.to(device)

    def _offload(self) -> None:
        if self._settings.offload_after_step:
            self.move_to(CPU)

    def _step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad = self._ranks.local(parameter.grad)
        self._adam.step()
        pairs = zip(self._weights, self._masters, strict=True)
        low_precision = [(w, m) for w, m in pairs if m is not w]
        if low_precision:
            with torch.no_grad():
                torch._foreach_copy_([w for w, _ in low_precision], [m for _, m in low_precision])
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                master.grad = None
