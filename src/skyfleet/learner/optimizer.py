"""AdamW with a schedule and clipping, on float32 copies where the weights are coarser."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skyfleet.learner.offload import CPU
from skyfleet.learner.schedules import Schedule, constant_with_warmup


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    lr: float
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    """At most this global norm; 0 or less does not clip."""
    schedule: Schedule = constant_with_warmup
    offload_after_step: bool = False
    """Moments and float32 copies wait on the CPU between steps."""


class Optimizer:
    def __init__(self, parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._settings = settings
        # An update of 1e-6 vanishes in a bfloat16 weight; it has to add up somewhere finer.
        self._masters: list[Tensor] = [
            p if p.dtype == torch.float32 else p.detach().float() for p in self._parameters
        ]
        for parameter in self._parameters:
            # Micro-batches' gradients add up as finely.
            parameter.grad_dtype = torch.float32
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=settings.lr,
            betas=settings.adam_betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._steps = 0
        self._rest()

    @property
    def lr(self) -> float:
        """Of the next step."""
        return self._settings.lr * self._settings.schedule(self._steps)

    def apply(self) -> float:
        """Take one step from the gathered gradients and clear them; their norm comes back.

        A norm that is not finite changes nothing: weights, moments and schedule stay.
        """
        limit = self._settings.max_grad_norm
        norm = float(nn.utils.clip_grad_norm_(self._parameters, limit if limit > 0 else math.inf))
        if math.isfinite(norm):
            if self._settings.offload_after_step:
                self.place(self._parameters[0].device)
            for group in self._adam.param_groups:
                group["lr"] = self.lr
            self._step()
            self._steps += 1
            self._rest()
        for parameter in self._parameters:
            parameter.grad = None
        return norm

    def state_dict(self) -> dict[str, Any]:
        coarse = any(p is not m for p, m in zip(self._parameters, self._masters, strict=True))
        masters = self._masters if coarse else []
        return {"adam": self._adam.state_dict(), "steps": self._steps, "masters": masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state["adam"])
        self._steps = state["steps"]
        for master, saved in zip(self._masters, state["masters"], strict=False):
            master.copy_(saved)
        self._rest()

    def place(self, device: torch.device) -> None:
        """Moments and float32 copies go to `device`; the weights stay where they are."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                master.data = master.data.to(device)
        for state in self._adam.state.values():
            for name, value in state.items():
                state[name] = value.to(device)

    def _rest(self) -> None:
        if self._settings.offload_after_step:
            self.place(CPU)

    def _step(self) -> None:
        pairs = list(zip(self._parameters, self._masters, strict=True))
        for parameter, master in pairs:
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad
        self._adam.step()
        coarse = [(p, m) for p, m in pairs if m is not p]
        if coarse:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in coarse], [m for _, m in coarse])
        for _, master in coarse:
            master.grad = None
