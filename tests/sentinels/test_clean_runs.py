"""A run without a bug has no findings, whatever its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.moody_world import MoodyWorld
from tests.fakes.small_runs import rows, small_config
from tests.sentinels.planted import IN_REWARD, KL, read_findings, run_steps, start_run

from skyfleet.envs.env import Env
from skyfleet.sentinels.build import active_filter_metrics
from skyfleet.sentinels.registry import SENTINELS
from skyfleet.tasks.task import Grade, Task
from skyfleet.worlds.catalog import get_world

PAIRS = "generator.n_samples_per_prompt=2"
ALGORITHM = "trainer.algorithm"


async def check_clean(folder: Path, steps: int, *settings: str) -> None:
    run = await start_run(folder, *settings)
    try:
        await run_steps(run, steps)
    finally:
        run.log.close()
    assert read_findings(folder) == []
    assert rows(folder)[-1]["step"] == steps


async def test_20_clean_steps_have_no_findings(tmp_path: Path) -> None:
    await check_clean(tmp_path, 20, KL)
    status = {k: v for row in rows(tmp_path) for k, v in row.items() if k.startswith("sentinel/")}
    assert status == {f"sentinel/{sentinel.name}": 0.0 for sentinel in SENTINELS}


@pytest.mark.exhaustive
async def test_200_clean_steps_have_no_findings(tmp_path: Path) -> None:
    await check_clean(tmp_path, 200, KL, f"{ALGORITHM}.zero_variance_filter=true", PAIRS)


@pytest.mark.parametrize(
    "settings",
    [
        ("generator.step_wise_trajectories=true",),
        ("generator.apply_overlong_filtering=true",),
        ("generator.zero_reward_on_non_stop=true",),
        ("generator.sampling_params.temperature=0.6", KL),
        ("generator.sampling_params.top_p=0.8",),
        ("trainer.bf16=true", KL),
        ("trainer.update_ref_every_epoch=true", "trainer.train_batch_size=8", KL),
        (f"{ALGORITHM}.zero_variance_filter=true", PAIRS, KL),
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
    await check_clean(tmp_path, 2, *settings)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("generator.step_wise_trajectories=true",),
        (f"{ALGORITHM}.advantage_estimator=rloo",),
        (f"{ALGORITHM}.advantage_estimator=reinforce++",),
        (f"{ALGORITHM}.advantage_estimator=reinforce++", "generator.step_wise_trajectories=true"),
        (f"{ALGORITHM}.advantage_batch_normalize=true",),
        (f"{ALGORITHM}.advantage_estimator=gae", "trainer.critic.model.path=tiny"),
    ],
    ids=lambda settings: "-".join(s.rpartition(".")[2] for s in settings) or "grpo",
)
async def test_kl_in_reward_is_not_taken_for_a_bug(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    await check_clean(tmp_path, 2, IN_REWARD, f"{ALGORITHM}.kl_estimator_type=k1", *settings)


async def test_distillation_is_not_taken_for_a_bug(tmp_path: Path) -> None:
    teacher = await start_run(tmp_path / "teacher", IN_REWARD, "trainer.seed=7")
    teacher.log.close()
    settings = (
        f"trainer.ref.model.path={teacher.checkpoints / 'global_step_0/policy'}",
        f"{ALGORITHM}.kl_estimator_type=k1",
        f"{ALGORITHM}.advantage_estimator=distillation",
        f"{ALGORITHM}.policy_loss_type=importance_sampling",
        f"{ALGORITHM}.kl_loss_coef=1",
    )
    await check_clean(tmp_path / "student", 2, IN_REWARD, *settings)


@pytest.mark.parametrize(
    ("reward", "attempts", "estimator"),
    [(0.11, 5, "grpo"), (0.1, 3, "grpo"), (0.7, 8, "rloo"), (0.1, 4, "reinforce++")],
)
async def test_attempts_that_earned_the_same_fraction_are_not_taken_for_a_bug(
    reward: float, attempts: int, estimator: str, tmp_path: Path
) -> None:
    """The floating-point mean of several 0.1 is not exactly 0.1."""

    class Even(MoodyWorld):
        async def grade(self) -> Grade:
            return Grade(reward=reward, success=False)

    async def open_even(task: Task) -> Env:
        return Even(get_world(task.env_key), task)

    settings = (
        f"generator.n_samples_per_prompt={attempts}",
        f"{ALGORITHM}.advantage_estimator={estimator}",
    )
    run = await start_run(tmp_path, *settings, open_env=open_even)
    try:
        await run_steps(run, 2)
    finally:
        run.log.close()
    assert read_findings(tmp_path) == []


async def test_every_active_filter_logs_a_metric(tmp_path: Path) -> None:
    rules = f"{ALGORITHM}.off_policy_correction"
    settings = (
        f"{ALGORITHM}.zero_variance_filter=true",
        f"{rules}.tis_ratio_type=sequence",
        f"{rules}.sequence_mask_metric=geometric",
        f"{rules}.outlier_token_is_threshold_high=5",
        f"{rules}.token_mask_is_threshold_low=0.5",
        f"{rules}.token_mask_is_threshold_high=2",
    )
    run = await start_run(tmp_path, *settings)
    try:
        await run_steps(run, 1)
    finally:
        run.log.close()
    acting = active_filter_metrics(small_config(tmp_path, *settings))
    assert len(acting) == 5
    assert rows(tmp_path)[-1].keys() >= set(acting)
