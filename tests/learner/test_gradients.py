"""Gradient norms by layer and by kind, on gradients written by hand."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch
from tests.fakes.samples import random_groups
from tests.fakes.small_models import small_decoder
from tests.learner.test_single_learner import SETTINGS, learner
from torch import nn

from skyfleet.learner.gradients import gradient_metrics


def weight(values: list[float], grad: list[float]) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values))
    made.grad = torch.tensor(grad)
    return made


def test_a_norm_is_told_for_every_layer_and_every_kind() -> None:
    named = {
        "model.embed_tokens.weight": weight([1.0], [2.0]),
        "model.layers.0.self_attn.q_proj.weight": weight([1.0, 1.0], [3.0, 4.0]),
        "model.layers.0.mlp.up_proj.weight": weight([1.0], [12.0]),
        "model.layers.1.self_attn.q_norm.weight": weight([1.0], [1.0]),
        "model.layers.1.input_layernorm.weight": weight([1.0], [2.0]),
        "model.norm.weight": weight([1.0], [2.0]),
    }
    metrics = gradient_metrics(named.items())
    metrics.pop("megabytes_edited")
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


def test_a_weight_is_edited_where_its_gradient_is_above_a_twentieth_of_it() -> None:
    edited = weight([1.0, -1.0, 1.0, 0.0], [0.06, 0.06, 0.04, -0.01])
    metrics = gradient_metrics([("lm_head.weight", edited), ("frozen", nn.Parameter(edited.data))])
    assert metrics["megabytes_edited"] == pytest.approx(3 * 3.6 / 8 / 2**20)
    assert gradient_metrics([])["megabytes_edited"] == 0.0


async def test_a_step_tells_norms_that_make_up_the_whole() -> None:
    settings = replace(SETTINGS, track_extra_gradient_metrics=True)
    metrics = (await learner(small_decoder(), settings).step(random_groups(2))).metrics
    norms = {k.rpartition("/")[2]: v for k, v in metrics.items() if "grad_norm/" in k}
    assert norms.keys() == {"layer_0", "layer_1", "embedding", "attention", "mlp", "norms"}
    kinds = [norms[kind] for kind in ("embedding", "attention", "mlp", "norms")]
    assert sum(n * n for n in kinds) == pytest.approx(metrics["policy/grad_norm"] ** 2, rel=1e-4)
    assert metrics["policy/megabytes_edited"] > 0
    plain = (await learner(small_decoder()).step(random_groups(2))).metrics
    assert plain == {k: metrics[k] for k in plain}
