"""Gradient norms by layer and by kind, on gradients written by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from math import sqrt

import pytest
import torch
from tests.fakes.samples import random_groups
from tests.fakes.small_models import small_decoder
from tests.learner.test_single_device_learner import SETTINGS, learner
from torch import nn

from skyfleet.learner.gradients import gradient_metrics


def weight(values: list[float], grad: list[float]) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values))
    made.grad = torch.tensor(grad)
    return made


def test_every_layer_and_every_kind_has_a_norm() -> None:
    named = {
        "model.embed_tokens.weight": weight([1.0], [2.0]),
        "model.layers.0.self_attn.q_proj.weight": weight([1.0, 1.0], [3.0, 4.0]),
        "model.layers.0.mlp.up_proj.weight": weight([1.0], [12.0]),
        "model.layers.1.self_attn.q_norm.weight": weight([1.0], [1.0]),
        "model.layers.1.input_layernorm.weight": weight([1.0], [2.0]),
        "model.norm.weight": weight([1.0], [2.0]),
    }
    metrics = gradient_metrics(named.items())
    for name in ("megabytes_edited", "grad:snr", "effective_rank"):
        metrics.pop(name)
    assert metrics == pytest.approx(
        {
            "grad_norm/embedding": 2.0,
            "grad_norm/attention": sqrt(26),  # 3, 4 and 1
            "grad_norm/mlp": 12.0,
            "grad_norm/norms": sqrt(8),
            "grad_norm/layer_0": 13.0,  # 5 and 12
            "grad_norm/layer_1": sqrt(5),
        }
    )


def test_a_weight_is_edited_if_its_gradient_is_above_a_twentieth_of_it() -> None:
    edited = weight([1.0, -1.0, 1.0, 0.0], [0.06, 0.06, 0.04, -0.01])
    metrics = gradient_metrics([("lm_head.weight", edited), ("frozen", nn.Parameter(edited.data))])
    assert metrics["megabytes_edited"] == pytest.approx(3 * 3.6 / 8 / 2**20)
    assert gradient_metrics([])["megabytes_edited"] == 0.0


def test_signal_to_noise_is_the_mean_over_the_deviation() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.tensor([1.0, 3.0, 1.0, 3.0])
    assert gradient_metrics([("w", weight)])["grad:snr"] == pytest.approx(2.0)
    assert gradient_metrics([])["grad:snr"] == 0.0


@pytest.mark.parametrize("turned", [False, True])
def test_the_effective_rank_counts_directions_by_their_weight(turned: bool) -> None:
    def rank(*singular: float) -> float:
        gradient = torch.zeros(3, 5)
        gradient[range(len(singular)), range(len(singular))] = torch.tensor(singular)
        weight = nn.Parameter(torch.ones(3, 5).T if turned else torch.ones(3, 5))
        weight.grad = gradient.T.contiguous() if turned else gradient
        return gradient_metrics([("w", weight)])["effective_rank"]

    assert rank(7.0) == pytest.approx(1.0)
    assert rank(2.0, 2.0, 2.0) == pytest.approx(3.0, rel=1e-4)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert rank(3.0, 1.0) == pytest.approx(math.exp(entropy), rel=1e-4)
    assert rank() == 0.0


def test_the_effective_rank_of_a_wide_outer_product_is_one() -> None:
    torch.manual_seed(0)
    made = nn.Parameter(torch.ones(512, 512))
    made.grad = torch.outer(torch.randn(512), torch.randn(512))
    assert gradient_metrics([("w", made)])["effective_rank"] == pytest.approx(1.0, abs=1e-3)


def test_a_gradient_that_is_not_finite_has_a_rank_of_nan() -> None:
    made = nn.Parameter(torch.ones(2, 2))
    made.grad = torch.full((2, 2), math.nan)
    assert math.isnan(gradient_metrics([("w", made)])["effective_rank"])


async def test_the_norms_of_a_step_add_up_to_the_total_norm() -> None:
    settings = replace(SETTINGS, track_extra_gradient_metrics=True)
    metrics = (await learner(small_decoder(), settings).step(random_groups(2))).metrics
    norms = {k.rpartition("/")[2]: v for k, v in metrics.items() if "grad_norm/" in k}
    assert norms.keys() == {"layer_0", "layer_1", "embedding", "attention", "mlp", "norms"}
    kinds = [norms[kind] for kind in ("embedding", "attention", "mlp", "norms")]
    assert sum(n * n for n in kinds) == pytest.approx(metrics["policy/grad_norm"] ** 2, rel=1e-4)
    assert metrics["policy/megabytes_edited"] > 0
    plain = (await learner(small_decoder()).step(random_groups(2))).metrics
    assert plain == {k: metrics[k] for k in plain}
