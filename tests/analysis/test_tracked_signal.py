"""Seed 003's signal analysis of tracked metrics, with numbers worked by hand."""

from __future__ import annotations

import pytest

from skyfleet.analysis.tracked_signal import compute_tracked_signals
from skyfleet.cli.analyze_tracked import format_signals
from skyfleet.errors import ConfigError


def rows(env: str, variances: list[float], **metrics: float) -> list[dict[str, float]]:
    more = {f"reward/{env}/{name}": value for name, value in metrics.items()}
    return [
        {"_step": step, f"reward/{env}/variance_per_prompt": variance, **more}
        for step, variance in enumerate(variances, start=1)
    ]


def test_variance_and_share_of_steps_are_those_of_seed_003() -> None:
    (signal,) = compute_tracked_signals(rows("github", [0.25, 0.0, 0.125, 0.125]))
    assert signal.env_key == "github"
    assert signal.n_steps == 4
    assert signal.variance_per_prompt == 0.125
    assert signal.steps_with_signal == 0.75
    assert signal.pass_rate is None
    assert signal.advice == "github: 75 % of 4 steps have a learning signal."


@pytest.mark.parametrize(
    ("passed", "why"),
    [(0.02, "too hard for"), (0.97, "too easy for"), (0.5, "too hard or too easy for")],
)
def test_below_a_quarter_the_environment_is_too_hard_or_too_easy(passed: float, why: str) -> None:
    (signal,) = compute_tracked_signals(rows("a", [0.1, 0, 0, 0, 0], pass_at_4=passed, pass_at_2=1))
    assert signal.steps_with_signal == 0.2
    assert f"a: 20 % of 5 steps have a learning signal, below 25 %: {why}" in signal.advice


def test_a_quarter_of_the_steps_is_enough() -> None:
    (signal,) = compute_tracked_signals(rows("a", [0, 0, 0, 0.1]))
    assert signal.advice == "a: 25 % of 4 steps have a learning signal."


def test_a_step_without_the_environment_is_not_counted_and_evaluations_are_shown() -> None:
    table = [
        {"_step": 0, "eval/a/pass_at_1": 0.2, "eval/a/pass_at_3": 0.4},
        *rows("a", [0.1], mean_positive_reward=0.3, signal_ratio=0.5),
        *rows("b", [0.0, 0.2]),
        {"_step": 9, "eval/a/pass_at_1": 0.3, "eval/a/pass_at_3": 0.7},
    ]
    a, b = compute_tracked_signals(table)
    assert (a.n_steps, b.n_steps) == (1, 2)
    assert (a.eval_first, a.eval_last, a.pass_rate, a.signal_ratio) == (0.4, 0.7, 0.3, 0.5)
    assert (b.eval_first, b.signal_ratio) == (None, None)
    assert (a.pass_metric, a.eval_metric) == ("mean positive reward", "pass@3")
    assert (b.pass_metric, b.eval_metric) == ("", "")


def test_the_table_names_the_attempts_of_its_pass_rates() -> None:
    table = [
        {"_step": 0, "eval/a/pass_at_2": 0.2},
        *rows("a", [0.1], pass_at_4=0.5),
        *rows("b", [0.1], mean_positive_reward=0.5),
    ]
    head = format_signals(compute_tracked_signals(table)).splitlines()[0]
    assert "| pass@4/mean positive reward | eval pass@2 first | eval pass@2 last |" in head


def test_a_run_without_variances_is_refused_with_what_it_logs() -> None:
    with pytest.raises(ConfigError, match=r"logs no reward/\{env\}/variance_per_prompt.* loss"):
        compute_tracked_signals([{"_step": 1, "loss/a": 1.0}])
