"""A key that is set while another key disables it is reported with that key."""

from __future__ import annotations

import pytest

from skyfleet.config.keys import known_keys
from skyfleet.config.loading import load_config
from skyfleet.config.warnings import DEPENDENCIES, warn_unused_keys

ALGORITHM = "trainer.algorithm"
NO_KL = f"{ALGORITHM}.use_kl_loss=false"
ADAPTIVE = f"{ALGORITHM}.kl_ctrl.type=adaptive"


def warn(*overrides: str) -> list[str]:
    return list(warn_unused_keys(load_config("", overrides)))


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("kl_ctrl.type=adaptive", "use_kl_in_reward=false"),
        ("kl_ctrl.horizon=500", "use_kl_in_reward=false"),
        ("entropy_loss_coef=0.1", "use_entropy_loss=false"),
        ("overlong_max_len=100", "overlong_buffer_len=null"),
        ("overlong_buffer_penalty_factor=0.5", "overlong_buffer_len=null"),
        ("max_seq_len=100", "loss_reduction=token_mean"),
        ("dynamic_sampling.max_sample_batches=5", "dynamic_sampling.type=null"),
        ("dynamic_sampling.min_replace_ratio=0.5", "dynamic_sampling.type=null"),
        (
            "off_policy_correction.geo_mask_high=1.1",
            "off_policy_correction.sequence_mask_metric=null",
        ),
    ],
)
def test_an_unused_key_is_reported_with_the_key_that_disables_it(override: str, cause: str) -> None:
    assert warn(f"{ALGORITHM}.{override}") == [
        f"{ALGORITHM}.{override} has no effect while {ALGORITHM}.{cause}"
    ]


def test_keys_of_one_cause_are_one_sentence() -> None:
    overrides = ("trainer.ref.model.path=other", f"{ALGORITHM}.kl_loss_coef=0.1", ADAPTIVE)
    assert warn(NO_KL, *overrides, "trainer.algorithm.entropy_loss_coef=0.1") == [
        f"{', '.join(overrides)} have no effect while {NO_KL} and {ALGORITHM}.use_kl_in_reward=false",
        "trainer.algorithm.entropy_loss_coef=0.1 has no effect while "
        "trainer.algorithm.use_entropy_loss=false",
    ]


def test_lora_keys_are_unused_without_a_rank() -> None:
    lora = "trainer.policy.model.lora"
    overrides = (
        f"{lora}.alpha=32",
        f'{lora}.target_modules=["q_proj"]',
        f"{lora}.exclude_modules=v_proj",
    )
    assert warn(*overrides) == [f"{', '.join(overrides)} have no effect while {lora}.rank=0"]
    assert warn(*overrides, f"{lora}.rank=8") == []
    assert warn(f"{lora}.dropout=0.1") == []  # refused, whatever the rank


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (f"{ALGORITHM}.kl_loss_coef=0.1", "trainer.update_ref_every_epoch=true"),
        (NO_KL, f"{ALGORITHM}.use_kl_in_reward=true", ADAPTIVE, f"{ALGORITHM}.kl_ctrl.horizon=99"),
        (f"{ALGORITHM}.dynamic_sampling.type=filter", f"{ALGORITHM}.zero_variance_filter_tol=0.1"),
        (NO_KL, f"{ALGORITHM}.gamma=1.0", f"{ALGORITHM}.kl_loss_coef=0.001"),
    ],
)
def test_a_key_that_is_read_or_holds_its_default_is_not_reported(
    overrides: tuple[str, ...],
) -> None:
    assert warn(*overrides) == []


def test_the_table_names_keys_that_exist() -> None:
    names = {
        f"trainer.{name}"
        for dependency in DEPENDENCIES
        for name in (*dependency.enabled_by, *dependency.keys)
    }
    keys = [f"{key}." for key in known_keys()]
    assert [name for name in names if not any(key.startswith(f"{name}.") for key in keys)] == []
