"""`trainer.fully_async`: what cannot run together is one sentence, and stale samples are corrected."""

from __future__ import annotations

import pytest

from skyfleet.algorithms.validation import algorithm_errors, correct_stale_samples
from skyfleet.config.loading import load_config
from skyfleet.errors import ConfigError

ON = "trainer.fully_async.enabled=true"
LOSS = "trainer.algorithm.policy_loss_type"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.fully_async.num_parallel_generation_workers=3", "is not between .*=4 and 20"),
        ("trainer.fully_async.num_parallel_generation_workers=21", "is not between .*=4 and 20"),
        ("trainer.algorithm.dynamic_sampling.type=filter", "sample_full_batch=true"),
        ("generator.backend=vllm", "placement.colocate_all=false"),
        ("trainer.fully_async.simulate_training=true", "is not supported"),
        ("trainer.fully_async.max_staleness_steps=-1", "max_staleness_steps"),
    ],
)
def test_a_contradiction_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config("", [ON, override])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (f"{LOSS}=clip_cov", "takes no correction for stale tokens"),
        ("generator.sampling_params.top_p=0.9", "a part of the vocabulary"),
    ],
)
def test_stale_samples_that_cannot_be_corrected_are_refused(override: str, sentence: str) -> None:
    config = load_config("", [ON, override])
    assert any(sentence in error for error in algorithm_errors(config))
    fresh = load_config("", [ON, override, "trainer.fully_async.max_staleness_steps=0"])
    assert not any("stale" in error for error in algorithm_errors(fresh))


@pytest.mark.parametrize(
    ("overrides", "correction"),
    [
        ((ON,), "token"),
        ((ON, "trainer.fully_async.max_staleness_steps=0"), None),
        ((), None),
        ((ON, f"{LOSS}=rollout_is"), None),
        ((ON, f"{LOSS}=cispo", "trainer.algorithm.cispo.cispo_anchor=rollout"), None),
        ((ON, f"{LOSS}=cispo"), "token"),
        ((ON, "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence"), "sequence"),
        ((ON, "trainer.algorithm.off_policy_correction.sequence_mask_metric=geometric"), None),
    ],
)
def test_stale_samples_are_corrected_by_default(
    overrides: tuple[str, ...], correction: str | None
) -> None:
    config = correct_stale_samples(load_config("", overrides))
    assert config.trainer.algorithm.off_policy_correction.tis_ratio_type == correction
    assert algorithm_errors(config) == []
