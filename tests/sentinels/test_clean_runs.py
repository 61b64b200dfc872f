"""A run without a bug is left alone, whatever it is configured to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.small_runs import rows
from tests.sentinels.planted import KL, begun, go_on, said

from skyfleet.sentinels.roster import ROSTER

PAIRS = "generator.n_samples_per_prompt=2"
ALGORITHM = "trainer.algorithm"


async def quiet(folder: Path, steps: int, *settings: str) -> None:
    run = await begun(folder, *settings)
    try:
        await go_on(run, steps)
    finally:
        run.log.close()
    assert said(folder) == []
    assert rows(folder)[-1]["step"] == steps


async def test_20_clean_steps_raise_nothing(tmp_path: Path) -> None:
    await quiet(tmp_path, 20, KL)
    status = {k: v for row in rows(tmp_path) for k, v in row.items() if k.startswith("sentinel/")}
    assert status == {f"sentinel/{sentinel.name}": 0.0 for sentinel in ROSTER}


@pytest.mark.slow
async def test_200_clean_steps_raise_nothing(tmp_path: Path) -> None:
    await quiet(tmp_path, 200, KL, f"{ALGORITHM}.zero_variance_filter=true", PAIRS)


@pytest.mark.parametrize(
    "settings",
    [
        ("generator.step_wise_trajectories=true",),
        ("generator.apply_overlong_filtering=true",),
        ("generator.zero_reward_on_non_stop=true",),
        ("generator.sampling_params.temperature=0.6", KL),
        ("generator.sampling_params.top_p=0.8",),
        ("trainer.bf16=true", KL),
        (f"{ALGORITHM}.dynamic_sampling.type=filter", PAIRS),
        (f"{ALGORITHM}.dynamic_sampling.type=replace", PAIRS),
        (f"{ALGORITHM}.advantage_estimator=rloo",),
        (f"{ALGORITHM}.advantage_estimator=maxrl",),
        (f"{ALGORITHM}.advantage_estimator=reinforce++", "generator.n_samples_per_prompt=1"),
        (f"{ALGORITHM}.advantage_estimator=gae", "trainer.critic.model.path=tiny"),
        (f"{ALGORITHM}.temperature=2", KL),
        (f"{ALGORITHM}.grpo_norm_by_std=false",),
        (f"{ALGORITHM}.advantage_batch_normalize=true",),
        (f"{ALGORITHM}.overlong_buffer_len=10", f"{ALGORITHM}.overlong_max_len=20"),
        (f"{ALGORITHM}.off_policy_correction.tis_ratio_type=token",),
        (f"{ALGORITHM}.policy_loss_type=clip_cov",),
        (f"{ALGORITHM}.policy_loss_type=cispo", "trainer.update_epochs_per_batch=2"),
        ("trainer.policy_mini_batch_size=4", "trainer.max_tokens_per_microbatch=700"),
    ],
    ids=lambda settings: settings[0].rpartition(".")[2],
)
async def test_no_setting_is_taken_for_a_bug(settings: tuple[str, ...], tmp_path: Path) -> None:
    await quiet(tmp_path, 2, *settings)


async def test_kl_in_reward_is_not_taken_for_a_bug(tmp_path: Path) -> None:
    run = await begun(tmp_path, KL)  # leaves the reference where the next run looks for it
    run.log.close()
    (tmp_path / "metrics.jsonl").unlink()
    in_reward = (f"{ALGORITHM}.use_kl_in_reward=true", f"{ALGORITHM}.kl_estimator_type=k1")
    await quiet(tmp_path, 2, *in_reward)
