"""AdamW steps worked by hand, clipping, float32 copies and checkpoints."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from skyfleet.learner.optimizer import Optimizer, OptimizerSettings, Schedule, constant_with_warmup


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def step(optimizer: Optimizer, weight: nn.Parameter, *grad: float) -> float:
    weight.grad = torch.tensor(grad)
    return optimizer.apply()


def warming(num_warmup_steps: int) -> Schedule:
    return partial(constant_with_warmup, num_warmup_steps=num_warmup_steps)


def values(weight: Tensor) -> list[float]:
    return weight.detach().tolist()


def test_the_first_step_is_the_learning_rate_plus_the_decay() -> None:
    weight = parameter(1.0, -2.0)
    optimizer = Optimizer([weight], OptimizerSettings(lr=0.1, weight_decay=0.01))
    # Adam's first step is the sign of the gradient; decay takes lr x 0.01 of the weight.
    assert step(optimizer, weight, 0.3, -0.4) == pytest.approx(0.5)
    assert values(weight) == pytest.approx([1 - 0.001 - 0.1, -2 + 0.002 + 0.1], abs=1e-6)
    assert weight.grad is None


def test_a_gradient_is_clipped_and_its_norm_before_clipping_is_returned() -> None:
    clipped, small = parameter(1.0), parameter(1.0)
    settings = OptimizerSettings(lr=0.1, max_grad_norm=1.0)
    one, other = Optimizer([clipped], settings), Optimizer([small], settings)
    assert step(one, clipped, 50.0) == pytest.approx(50.0)
    step(other, small, 1.0)
    # What the moments remember shows in the second step: a clipped 50 is a 1.
    step(one, clipped, 0.5)
    step(other, small, 0.5)
    assert values(clipped) == pytest.approx(values(small), abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    disturbed, calm = parameter(1.0, 2.0), parameter(1.0, 2.0)
    settings = OptimizerSettings(lr=0.1, schedule=warming(2))
    one, other = Optimizer([disturbed], settings), Optimizer([calm], settings)
    for optimizer, weight in ((one, disturbed), (other, calm)):
        step(optimizer, weight, 0.3, -0.1)
    before = values(disturbed)
    assert not math.isfinite(step(one, disturbed, bad, 1.0))
    assert values(disturbed) == before
    assert disturbed.grad is None
    for optimizer, weight in ((one, disturbed), (other, calm)):
        step(optimizer, weight, -0.2, 0.7)
    assert values(disturbed) == values(calm)


def test_small_steps_accumulate_in_float32_for_bfloat16_weights() -> None:
    weight, plain = parameter(1.0, dtype=torch.bfloat16), parameter(1.0, dtype=torch.bfloat16)
    optimizer = Optimizer([weight], OptimizerSettings(lr=1e-5, weight_decay=0.0))
    without_masters = torch.optim.AdamW([plain], lr=1e-5, weight_decay=0.0)
    for _ in range(400):
        step(optimizer, weight, 1.0)
        plain.grad = torch.ones_like(plain)
        without_masters.step()
    # 400 x 1e-5 = 0.004 is one bfloat16 step below 1.
    assert values(weight) == [1 - 2**-8]
    assert values(plain) == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_optimizer_continues_bit_for_bit(dtype: torch.dtype) -> None:
    settings = OptimizerSettings(lr=1e-3, schedule=warming(5))
    weight = parameter(1.0, -3.0, dtype=dtype)
    optimizer = Optimizer([weight], settings)
    for grad in (0.3, 0.1, -0.4):
        step(optimizer, weight, grad, 1.0)
    copy = nn.Parameter(weight.detach().clone())
    resumed = Optimizer([copy], settings)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    assert resumed.lr == optimizer.lr
    for grad in (0.2, -0.5, 0.1):
        step(optimizer, weight, grad, -1.0)
        step(resumed, copy, grad, -1.0)
    assert values(weight) == values(copy)
