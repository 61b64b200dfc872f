"""AdamW with warm-up and clipping, on float32 copies where the weights are coarser."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    lr: float
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    """At most this global norm; 0 or less does not clip."""
    num_warmup_steps: int = 0
    decay_steps: int | None = None
    """Where given, the rate falls linearly to a tenth over so many steps."""

    def lr_at(self, step: int) -> float:
        """`step` counts from 0."""
        warm = min(1.0, (step + 1) / (self.num_warmup_steps + 1))
        cooled = 1.0 if self.decay_steps is None else max(0.1, 1 - 0.9 * step / self.decay_steps)
        return self.lr * warm * cooled


class Optimizer:
    def __init__(self, parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._settings = settings
        # An update of 1e-6 vanishes in a bfloat16 weight; it has to add up somewhere finer.
        self._masters: list[Tensor] = [
            p if p.dtype == torch.float32 else p.detach().float() for p in self._parameters
        ]
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=settings.lr,
            betas=settings.adam_betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._steps = 0

    @property
    def lr(self) -> float:
        """Of the next step."""
        return self._settings.lr_at(self._steps)

    def apply(self) -> float:
        """Take one step from the gathered gradients and clear them; their norm comes back.

        A norm that is not finite changes nothing: weights, moments and schedule stay.
        """
        limit = self._settings.max_grad_norm
        norm = float(nn.utils.clip_grad_norm_(self._parameters, limit if limit > 0 else math.inf))
        if math.isfinite(norm):
            for group in self._adam.param_groups:
                group["lr"] = self.lr
            self._step()
            self._steps += 1
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

    def _step(self) -> None:
        pairs = list(zip(self._parameters, self._masters, strict=True))
        for parameter, master in pairs:
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        self._adam.step()
        with torch.no_grad():
            for parameter, master in pairs:
                if master is not parameter:
                    parameter.copy_(master)
                    master.grad = None
