"""A whole training run applies the algorithm settings of its configuration."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.fakes.moody_world import open_moody
from tests.fakes.small_models import small_decoder
from tests.fakes.small_runs import rows, small_config

from skyfleet.envs import registry
from skyfleet.errors import ModelError, SkyfleetError
from skyfleet.learner.factory import build_learner, build_learner_settings
from skyfleet.models.decoder import Decoder
from skyfleet.sentinels.build import active_filter_metrics, build_invariants
from skyfleet.trainer.limits import build_limits
from skyfleet.trainer.load_policy import load_policy_model
from skyfleet.trainer.tasks import load_training_tasks
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.archive import read_trajectories, train_path
from skyfleet.trajectories.trajectory import Ending

SHORT = (
    *(
        "trainer.max_training_steps=1",
        "trainer.eval_interval=-1",
        "trainer.eval_before_train=false",
    ),
    *("trainer.warm_start.steps=1", "trainer.algorithm.use_kl_loss=false"),
)
KL_IN_REWARD = ("trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.kl_estimator_type=k1")


@pytest.fixture(autouse=True)
def _moody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an environment whose rewards differ within a group, so every step changes the weights."""
    monkeypatch.setitem(registry.ENV_CLASSES, "world", lambda _: open_moody)


async def last_row(folder: Path, *overrides: str) -> dict[str, float]:
    await run_training(small_config(folder, *SHORT, *overrides))
    return rows(folder)[-1]


async def test_dynamic_sampling_collects_until_the_filtered_batch_is_full(tmp_path: Path) -> None:
    row = await last_row(
        tmp_path,
        "trainer.algorithm.dynamic_sampling.type=filter",
        "generator.n_samples_per_prompt=2",
        "trainer.seed=1",
    )
    trajectories = list(read_trajectories(train_path(tmp_path / "trajectories", 1)))
    rewards: dict[str, list[float]] = {}
    for attempt in trajectories:
        rewards.setdefault(attempt.task_key, []).append(attempt.reward or 0.0)
    informative = [r for r in rewards.values() if len(set(r)) > 1]
    assert len(trajectories) > 4  # more than one batch of two tasks with two attempts each
    assert row["filter/zero_variance"] == len(rewards) - len(informative)
    assert row["loss/num_samples"] == sum(len(r) for r in informative[:2])


async def test_a_batch_that_never_fills_stops_the_run_with_an_error(
    tmp_path: Path,
) -> None:
    with pytest.raises(SkyfleetError, match="max_sample_batches=2 batches did not hold enough"):
        await last_row(
            tmp_path,
            "trainer.algorithm.dynamic_sampling.type=filter",
            "trainer.algorithm.dynamic_sampling.max_sample_batches=2",
            "trainer.algorithm.zero_variance_filter_tol=100",
        )


async def test_attempts_changed_by_length_filters_are_counted(tmp_path: Path) -> None:
    settings = (
        "generator.zero_reward_on_non_stop=true",
        "generator.apply_overlong_filtering=true",
        "trainer.algorithm.overlong_buffer_len=10",
        "trainer.algorithm.overlong_max_len=20",
    )
    row = await last_row(tmp_path, *settings, "generator.max_turns=4")
    trajectories = list(read_trajectories(train_path(tmp_path / "trajectories", 1)))
    n_sampled = [
        sum(sum(each.loss_mask) for each in attempt.transcripts) for attempt in trajectories
    ]
    endings = Counter(attempt.ending for attempt in trajectories)
    logged = {key: value for key, value in row.items() if key.startswith("filter/")}
    assert logged == {
        "filter/unknown_grade": 0,
        "filter/too_few_graded": 0,
        # The last turn's finish reason counts; this environment passes every attempt.
        "filter/zeroed": endings[Ending.LENGTH],
        "filter/punished": sum(n > 10 for n in n_sampled),
        "filter/overlong": endings[Ending.LENGTH] + endings[Ending.MAX_TURNS],
    }
    assert logged.keys() > set(active_filter_metrics(small_config(tmp_path, *settings)))


async def test_step_wise_trajectories_give_one_sample_per_turn(tmp_path: Path) -> None:
    row = await last_row(tmp_path, "generator.step_wise_trajectories=true")
    trajectories = read_trajectories(train_path(tmp_path / "trajectories", 1))
    assert row["loss/num_samples"] == sum(len(t.turns) for t in trajectories if t.grade is not None)


async def test_kl_in_reward_changes_the_gradient(tmp_path: Path) -> None:
    plain = await last_row(tmp_path / "plain", "trainer.max_training_steps=2")
    penalised = await last_row(
        tmp_path / "penalised",
        *KL_IN_REWARD,
        "trainer.max_training_steps=2",
        "trainer.algorithm.kl_loss_coef=0.5",
    )
    assert penalised["loss/kl_loss_coef"] == 0.5
    assert abs(penalised["loss/avg_kl"]) > 1e-6
    assert penalised["policy/grad_norm"] != plain["policy/grad_norm"]


async def test_distillation_trains_with_one_sample_per_prompt(tmp_path: Path) -> None:
    await last_row(tmp_path / "teacher", "trainer.warm_start.steps=20")
    teacher = tmp_path / "teacher/checkpoints/global_step_1/policy"
    row = await last_row(
        tmp_path / "student",
        *KL_IN_REWARD,
        f"trainer.ref.model.path={teacher}",
        "trainer.algorithm.advantage_estimator=distillation",
        "trainer.algorithm.policy_loss_type=importance_sampling",
        "trainer.algorithm.kl_loss_coef=1",
        "generator.n_samples_per_prompt=1",
    )
    assert row["loss/num_samples"] == 2
    assert row["loss/avg_kl"] > 0
    assert row["policy/grad_norm"] > 0


async def test_a_run_warns_about_unused_keys_at_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await last_row(tmp_path, "trainer.algorithm.gamma=0.9")
    assert "trainer.algorithm.gamma=0.9 has no effect while" in caplog.text


@pytest.mark.parametrize("loss", ["regular", "gspo"])
async def test_one_update_per_batch_in_bfloat16_clips_nothing(loss: str, tmp_path: Path) -> None:
    """The engine's bfloat16 logprobs are approximate; the ratio uses the learner's own ones."""
    row = await last_row(
        tmp_path,
        "trainer.bf16=true",
        "trainer.policy_mini_batch_size=2",
        f"trainer.algorithm.policy_loss_type={loss}",
        "trainer.algorithm.eps_clip_low=2e-5",
        "trainer.algorithm.eps_clip_high=2e-5",
    )
    assert row["policy/rollout_train_logprobs_abs_diff_mean"] > 5e-5
    assert row["policy/grad_norm"] > 0
    assert row["policy/ppo_clip_ratio"] == 0


@pytest.mark.parametrize(
    ("backend", "dtype", "capability", "to_engine", "to_reference"),
    [
        ("embedded", torch.float32, None, 0.001, 0.001),
        ("embedded", torch.bfloat16, (9, 0), 0.001, 0.001),
        ("embedded", torch.bfloat16, (8, 0), 0.03, 0.03),
        ("embedded", torch.bfloat16, None, 0.03, 0.03),
        ("vllm", torch.bfloat16, (9, 0), 0.05, 0.001),
    ],
)
def test_the_logprob_tolerance_depends_on_backend_dtype_and_gpu(
    backend: str,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    to_engine: float,
    to_reference: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = small_decoder(dtype=dtype)
    if capability:
        monkeypatch.setattr(Decoder, "is_fused", True)
        monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    config = small_config(tmp_path, f"generator.backend={backend}")
    expected = build_invariants(
        config, decoder, build_limits(config), envs=[], reference_interval=-1
    )
    assert (expected.logprob_tolerance, expected.reference_tolerance) == (to_engine, to_reference)
    settings = build_learner_settings(config, decoder, total_steps=1)
    assert settings.recompute_old_logprobs == (to_engine > 0.001)


def test_kl_cov_recomputes_old_logprobs_with_the_learner(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.algorithm.policy_loss_type=kl_cov")
    assert build_learner_settings(config, small_decoder(), total_steps=1).recompute_old_logprobs


async def test_an_unreadable_reference_model_is_an_error_that_names_its_key(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.ref.model.path=/nowhere")
    policy_model = await load_policy_model(config, load_training_tasks(config), open_moody)
    with pytest.raises(ModelError, match=r"^trainer\.ref\.model\.path='/nowhere' is not a model"):
        build_learner(config, policy_model, lambda: tmp_path, total_steps=1)
