"""Proof: whether a vLLM was given, and holds, the very bits that were sent to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from skyfleet.models.bit_sums import bit_sums

Sums = Mapping[str, list[int]]
"""A tensor's `bit_sums` by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    shapes: Mapping[str, list[int]]
    sent: Sums
    held: Mapping[str, Sums]
    """As each precision that an engine may have rounds them."""

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], model_dtypes: Iterable[str]) -> Self:
        sent = {name: bit_sums(weight).tolist() for name, weight in weights.items()}
        return cls(
            shapes={name: list(weight.shape) for name, weight in weights.items()},
            sent=sent,
            held={
                named: {
                    name: sent[name]
                    if weight.dtype is dtype
                    else bit_sums(weight.to(dtype)).tolist()
                    for name, weight in weights.items()
                }
                for named in model_dtypes
                for dtype in (getattr(torch, named),)
            },
        )

    def fault(self, told: Mapping[str, Sums], model_dtype: str) -> str:
        """What is wrong with `WeightDoor.skyfleet_sums`' answer, if anything is.

        Every tensor that was sent must have been given to vLLM, and what can be read back must be it.
        """
        given, held, read = told["given"], told["held"], self.held[model_dtype]
        odd = {
            "was given": [name for name, sums in self.sent.items() if given.get(name) != sums],
            "holds": [name for name, sums in held.items() if read.get(name) != sums],
        }
        for what, names in odd.items():
            if names:
                return (
                    f"{what} other weights than the learner's: {len(names)} of {len(self.sent)} "
                    f"tensors, first {names[0]}"
                )
        return ""
