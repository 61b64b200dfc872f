"""Schedules: optimiser steps taken -> the share of its rate that the next one learns at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import cos, pi

Schedule = Callable[[int], float]


def constant_with_warmup(step: int, *, num_warmup_steps: int = 0) -> float:
    """Rises in even steps to 1 and stays. The first step learns too: none is taken at a rate of 0."""
    return min(1.0, (step + 1) / (num_warmup_steps + 1))


def linear(step: int, *, num_warmup_steps: int, total_steps: int) -> float:
    """After the warm-up it falls evenly; a step after the last would be at 0."""
    warm = constant_with_warmup(step, num_warmup_steps=num_warmup_steps)
    return warm * (1 - _progress(step, num_warmup_steps, total_steps))


def cosine(step: int, *, num_warmup_steps: int, total_steps: int) -> float:
    """After the warm-up it falls along half a cosine, slowly at both ends."""
    warm = constant_with_warmup(step, num_warmup_steps=num_warmup_steps)
    return warm * (1 + cos(pi * _progress(step, num_warmup_steps, total_steps))) / 2


def linear_to_a_tenth(step: int, *, num_warmup_steps: int, total_steps: int) -> float:
    """Falls from the first step on, and never below a tenth: what the warm start learns at."""
    warm = constant_with_warmup(step, num_warmup_steps=num_warmup_steps)
    return warm * max(0.1, 1 - 0.9 * step / total_steps)


def schedule_named(name: str, *, num_warmup_steps: int, total_steps: int) -> Schedule:
    """`total_steps` are all optimiser steps of the run."""
    if name == "constant_with_warmup":
        return partial(constant_with_warmup, num_warmup_steps=num_warmup_steps)
    falling = {"linear": linear, "cosine": cosine}[name]
    return partial(falling, num_warmup_steps=num_warmup_steps, total_steps=total_steps)


def _progress(step: int, num_warmup_steps: int, total_steps: int) -> float:
    """From 0, when the warm-up ends, to 1."""
    return min(max(0, step - num_warmup_steps) / max(1, total_steps - num_warmup_steps), 1.0)
