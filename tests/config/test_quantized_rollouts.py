"""FP8 rollouts through vLLM need a correction, and no other engine takes the setting."""

from __future__ import annotations

import pytest

from skyfleet.algorithms.validation import algorithm_errors
from skyfleet.config.loading import load_config_file
from skyfleet.config.validation import find_unsupported_values

FP8 = "generator.engine_init_kwargs.quantization=fp8"
NO_CORRECTION = "trainer.algorithm.off_policy_correction.tis_ratio_type=null"


def test_samples_of_rounded_weights_need_a_correction() -> None:
    (error,) = algorithm_errors(load_config_file("qwen3_8b_8xh200", [FP8, NO_CORRECTION]))
    assert "set trainer.algorithm.off_policy_correction.tis_ratio_type=token" in error
    for overrides in (
        [FP8],
        [FP8, NO_CORRECTION, "trainer.algorithm.policy_loss_type=rollout_is"],
        [NO_CORRECTION],
    ):
        assert list(algorithm_errors(load_config_file("qwen3_8b_8xh200", overrides))) == []


@pytest.mark.parametrize("spelling", ["generator", "generator.inference_engine"])
def test_the_embedded_engine_refuses_quantization(spelling: str) -> None:
    config = load_config_file("tiny", [f"{spelling}.engine_init_kwargs.quantization=fp8"])
    (problem,) = find_unsupported_values(config)
    assert "only a vLLM engine started here reads it" in problem
