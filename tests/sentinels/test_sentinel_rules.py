"""Single checks on numbers worked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
import torch
from tests.fakes.small_models import small_decoder
from tests.trajectories.making import attempt

from skyfleet.algorithms.filters import drop_zero_variance
from skyfleet.config.loading import load_config
from skyfleet.rollouts.episode import Limits
from skyfleet.sentinels.advantage_checks import batch_accounting
from skyfleet.sentinels.constant_metrics import constant_metrics
from skyfleet.sentinels.fingerprint import find_differences, fingerprint
from skyfleet.sentinels.stages import (
    MAX_COMPARED_TOKENS,
    AdvantageStage,
    Invariants,
    MetricsStage,
    rotate_share,
)
from skyfleet.sentinels.trend_checks import (
    MetricsHistory,
    equal_rewards,
    idle_filter,
    nothing_graded,
    nothing_learned,
    parse_failures,
)
from skyfleet.sentinels.update_checks import guess_cause
from skyfleet.trajectories.trajectory import Group

LIMITS = Limits(max_turns=1, max_input_length=1, trajectory_timeout_seconds=0)
EXPECTED = Invariants(
    n_samples=2,
    batch_size=1,
    mini_batch_size=1,
    limits=LIMITS,
    envs=frozenset(),
    filter_metrics=("filter/zero_variance",),
)


def stage(*history: dict[str, float]) -> MetricsStage:
    return stage_of(EXPECTED, *history)


def stage_of(expected: Invariants, *history: dict[str, float]) -> MetricsStage:
    return MetricsStage(
        expected=expected,
        metrics=history[-1],
        first_rows=history[:3],
        last_rows=history[:-1],
        first_grading_error="env: away",
    )


def test_of_a_task_that_a_step_has_twice_one_group_may_be_dropped() -> None:
    groups = [
        Group(
            task_key="t", env_key="e", trajectories=tuple(attempt(r, task_key="t") for r in rewards)
        )
        for rewards in ((0.0, 0.0), (0.0, 1.0))
    ]
    kept = drop_zero_variance(groups)
    kept.dropped["unknown_grade"] = 0
    checked = AdvantageStage(
        expected=EXPECTED, step=1, groups=groups, kept=kept, attempts={}, samples=[], sums=[],
        n_sampled={},
    )  # fmt: skip
    assert batch_accounting(checked) is None
    changed = replace(kept, groups=(replace(groups[1], trajectories=(attempt(1.0), attempt(1.0))),))
    wrong = batch_accounting(replace(checked, kept=changed))
    assert wrong is not None
    assert wrong.sentence == "the rewards trained on are not those that were earned"


def test_a_step_without_a_turn_has_no_jump_of_malformed_calls() -> None:
    rows = [{"reward/parse_failure_rate": value} for value in (0.1, nan)]
    assert parse_failures(stage(*rows)) is None
    assert parse_failures(stage(rows[0], {"reward/parse_failure_rate": 0.9})) is not None


def test_a_filter_that_never_acts_is_found_after_20_steps() -> None:
    idle, busy = {"filter/zero_variance": 0.0}, {"filter/zero_variance": 1.0}
    assert idle_filter(stage(*[idle] * 19)) is None
    assert idle_filter(stage(busy, *[idle] * 19)) is None
    finding = idle_filter(stage(*[idle] * 20))
    assert finding is not None
    assert finding.evidence == {"metric": "filter/zero_variance", "steps": 20}


def test_filters_that_never_act_are_named_together() -> None:
    metrics = ("filter/zero_variance", "filter/overlong")
    rows = [dict.fromkeys(metrics, 0.0)] * 20
    expected = replace(EXPECTED, filter_metrics=metrics)
    finding = idle_filter(stage_of(expected, *rows))
    assert finding is not None
    assert finding.evidence["metric"] == "filter/zero_variance filter/overlong"


def test_three_steps_without_a_grade_are_a_failed_run() -> None:
    unknown, graded = {"reward/unknown_grades": 4.0}, {"generation/avg_reward": 0.0}
    assert nothing_graded(stage(*[unknown] * 2)) is None
    assert nothing_graded(stage(unknown, graded, unknown)) is None
    assert nothing_graded(stage(graded, *[unknown] * 3)) is not None
    finding = nothing_graded(stage(graded, *[{**unknown, "generation/avg_reward": nan}] * 3))
    assert finding is not None
    assert finding.evidence == {"steps": 3, "first": "env: away"}


def test_three_updates_that_are_not_finite_are_a_failed_run() -> None:
    sound = {"policy/policy_lr": 1.0, "policy/final_loss": 0.0, "policy/grad_norm": 1.0}
    kept = {"policy/policy_lr": 1.0, "policy/final_loss": 0.0}  # as the history has it
    now, idle = kept | {"policy/grad_norm": nan}, {"generation/avg_reward": 0.0}
    assert nothing_learned(stage(kept, now)) is None
    assert nothing_learned(stage(kept, sound, kept, now)) is None
    assert nothing_learned(stage(kept, kept, kept, idle)) is None
    assert nothing_learned(stage(sound, kept, idle, kept, sound)) is None
    finding = nothing_learned(stage(sound, kept, idle, kept, now))
    assert finding is not None
    assert finding.evidence == {"steps": 3, "final_loss": "0.0", "grad_norm": "nan"}


def test_rewards_that_never_differ_are_found_after_10_steps() -> None:
    flat, varied = {"reward/a/signal_ratio": 0.0}, {"reward/a/signal_ratio": 0.5}
    assert equal_rewards(stage(*[flat] * 9)) is None
    assert equal_rewards(stage(varied, *[flat] * 9)) is None
    assert equal_rewards(stage(varied, *[flat] * 10)) is not None


def test_one_changed_weight_changes_the_fingerprint() -> None:
    weights = dict(small_decoder().module.named_parameters())
    before = fingerprint(weights)
    assert before.equal(fingerprint(weights))
    with torch.no_grad():
        next(iter(weights.values()))[3, 5] += 1e-7
    assert not before.equal(fingerprint(weights))


def test_swapped_halves_change_the_fingerprint() -> None:
    weight = torch.arange(16.0)
    assert not fingerprint({"a": weight}).equal(fingerprint({"a": weight.roll(8)}))


def test_tensors_of_one_shape_have_a_row_each_however_many_are_summed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = {"a": torch.arange(16.0), "b": torch.ones(3), "c": -torch.arange(16.0)}
    together = fingerprint(weights)
    monkeypatch.setattr("skyfleet.sentinels.fingerprint.MAX_STACKED_BYTES", 0)
    assert together.equal(fingerprint(weights))
    # One is 0x3f800000; three do not divide into eight blocks.
    assert together[2].tolist() == [3 * 0x3F800000] * 8
    swapped = {"a": weights["c"], "b": weights["b"], "c": weights["a"]}
    assert not together.equal(fingerprint(swapped))


def test_weights_differ_by_bits_by_shape_and_by_absence() -> None:
    ours = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4), "lora_A": torch.ones(2)}
    theirs = {"a": torch.ones(4), "b": torch.full((4,), 1 + 1e-6), "c": torch.ones(2)}
    assert find_differences(ours, theirs) == ["b", "c", "lora_A"]


def test_weights_are_compared_in_the_precision_of_the_engine() -> None:
    ours = {"a": torch.tensor([1.001, 2.002])}
    assert find_differences(ours, {"a": ours["a"].bfloat16()}) == []
    assert find_differences(ours, {"a": torch.tensor([1.1, 2.0]).bfloat16()}) == ["a"]


def test_the_cause_of_a_gap_is_guessed_from_its_pattern() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(400, 50, generator=draw, dtype=torch.float64)
    own_NV = torch.log_softmax(scores, dim=-1)
    tokens = torch.multinomial(own_NV.exp(), 1, generator=draw)
    own = own_NV.gather(1, tokens).squeeze(1)
    cooler = torch.log_softmax(scores / 0.6, dim=-1).gather(1, tokens).squeeze(1)
    noise = 0.01 * torch.randn(400, generator=draw, dtype=torch.float64)
    shuffled = own[torch.randperm(400, generator=draw)]
    assert guess_cause(own, cooler).startswith("temperature")
    assert guess_cause(own, own + noise).startswith("dtype")
    assert guess_cause(own, own + 0.05 + noise.abs()).startswith("truncation")
    assert guess_cause(own, shuffled).startswith("other tokens or weights")


def test_a_missing_temperature_is_recognized_for_a_confident_policy() -> None:
    draw = torch.Generator().manual_seed(3)
    scores = 3 * torch.randn(400, 50, generator=draw, dtype=torch.float64)
    best = scores[:360].argmax(dim=-1, keepdim=True)
    scores[:360].scatter_add_(1, best, torch.full((360, 1), 6.0, dtype=torch.float64))
    own_NV = torch.log_softmax(scores / 0.7, dim=-1)
    tokens = torch.multinomial(own_NV.exp(), 1, generator=draw)
    own = own_NV.gather(1, tokens).squeeze(1)
    engine = torch.log_softmax(scores, dim=-1).gather(1, tokens).squeeze(1)
    assert guess_cause(own, engine) == "temperature"


def test_the_history_reads_every_training_row_once_and_leaves_out_nulls(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = MetricsHistory(path)
    assert history.read() == ([], [])
    rows: list[dict[str, float | None]] = [{"step": step, "a": None, "b": 2.0} for step in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    history.read()
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[3:])
    first, last = history.read()
    assert [row["step"] for row in first] == [1, 2, 3]
    assert [row["step"] for row in last] == [1, 2, 3, 4]
    assert "a" not in last[0]


def test_every_part_of_a_large_batch_is_compared_in_turn() -> None:
    assert rotate_share("abcd", MAX_COMPARED_TOKENS, step=1) == "abcd"
    assert [rotate_share("abcd", 2 * MAX_COMPARED_TOKENS, step=step) for step in (1, 2)] == [
        "bd",
        "ac",
    ]
    assert [rotate_share("abcd", 2 * MAX_COMPARED_TOKENS + 1, step=step) for step in (1, 2, 3)] == [
        "b",
        "c",
        "ad",
    ]


def test_a_clip_ratio_that_cannot_vary_is_labelled() -> None:
    one = ("trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8")
    assert list(constant_metrics(load_config("", one))) == ["policy/ppo_clip_ratio"]
    for more in (
        "trainer.policy_mini_batch_size=4",
        "trainer.update_epochs_per_batch=2",
        "trainer.algorithm.policy_loss_type=sapo",
    ):
        assert constant_metrics(load_config("", [*one, more])) == {}


CISPO = ["policy/ppo_clip_ratio", "policy/cispo_ratio_{mean,clamped_mean,max,min}"]


@pytest.mark.parametrize(
    ("settings", "in_float32", "in_bfloat16"),
    [
        (("policy_loss_type=cispo",), CISPO, CISPO),
        (("policy_loss_type=cispo", "cispo.cispo_anchor=rollout"), CISPO, []),
        (("policy_loss_type=dppo",), ["policy/ppo_clip_ratio"], []),
        (("policy_loss_type=rollout_is",), ["policy/ppo_clip_ratio"], []),
        (("policy_loss_type=importance_sampling",), *[["policy/importance_ratio"]] * 2),
        (("policy_loss_type=kl_cov",), *[["policy/kl_cov_ratio"]] * 2),
        (
            ("policy_loss_type=sapo", "off_policy_correction.tis_ratio_type=token"),
            ["policy/is_ratio_{mean,max,min}"],
            [],
        ),
    ],
    ids=lambda case: case[-1] if isinstance(case, tuple) else "",
)
def test_ratios_that_cannot_vary_are_labelled(
    settings: tuple[str, ...], in_float32: list[str], in_bfloat16: list[str]
) -> None:
    one = ["trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8"]
    one += [f"trainer.algorithm.{setting}" for setting in settings]
    assert list(constant_metrics(load_config("", [*one, "trainer.bf16=false"]))) == in_float32
    assert list(constant_metrics(load_config("", [*one, "trainer.bf16=true"]))) == in_bfloat16
