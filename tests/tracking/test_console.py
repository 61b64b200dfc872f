from __future__ import annotations

import io
import os
import pty
import select

import pytest

from skyfleet.tracking.console import ConsoleTracker, summary

METRICS = {
    "timing/train_critic_and_policy": 3.04,
    "reward/avg_raw_reward": 0.41234,
    "timing/generate": 12.1,
    "reward/avg_pass_at_4": 0.5,
    "timing/step": 20.0,
    "reward/github/pass_at_4": 0.25,
}
SUMMARY = "reward 0.412  pass@4 0.500  generate 12.1 s  train 3.0 s"


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_summary_leaves_out_what_is_not_logged() -> None:
    assert summary(METRICS) == SUMMARY
    assert summary({"eval/all/pass_at_1": 1.0}) == ""
    assert summary({"reward/avg_raw_reward": float("nan")}) == ""


def test_a_step_without_samples_reports_no_learning_signal() -> None:
    assert summary({"loss/num_samples": 0.0, "timing/generate": 2.0}) == (
        "no learning signal  generate 2.0 s"
    )
    assert summary({"loss/num_samples": 8.0}) == ""


def test_a_step_without_samples_names_the_ending_that_all_episodes_share() -> None:
    metrics = {"loss/num_samples": 0.0, "generate/ending_done": 0.0}
    assert summary(metrics | {"generate/ending_context_full": 0.9}) == "no learning signal"
    text = summary(metrics | {"generate/ending_context_full": 1.0})
    assert text == "no learning signal: every episode ended context_full"
    assert summary(metrics | {"generate/ending_done": 1.0}) == "no learning signal"


def test_a_step_whose_rewards_are_equal_says_so() -> None:
    metrics = {"loss/num_samples": 8.0, "loss/avg_raw_advantages_abs": 0.0}
    metrics |= {"train/min_reward": 0.5, "train/max_reward": 0.5}
    assert summary(metrics) == "no learning signal: all rewards equal"
    metrics["train/max_reward"] = 1.0
    assert summary(metrics) == "no learning signal: all rewards of each task equal"
    assert summary(metrics | {"loss/avg_raw_advantages_abs": 0.5}) == ""


def test_a_step_without_grades_names_the_first_failure_on_its_line_only() -> None:
    stream = io.StringIO()
    console = ConsoleTracker(stream=stream)
    console.explain("env_error: reward() failed\nKeyError: 'x'")
    for step in (1, 2):
        console.log({"loss/num_samples": 0.0, "generate/ending_length": 1.0}, step)
    first, second = stream.getvalue().splitlines()
    assert first == "step 1  no learning signal: env_error: reward() failed\\nKeyError: 'x'"
    assert second == "step 2  no learning signal: every episode ended length"


def test_a_resumed_phase_continues_its_count() -> None:
    stream = io.StringIO()
    with ConsoleTracker(stream=stream).progress("warm start", 10, done=8) as advance:
        advance()
        advance()
    assert stream.getvalue().splitlines()[-1] == "warm start 10/10"


def test_without_a_terminal_every_step_is_a_line() -> None:
    stream, clock = io.StringIO(), Clock()
    tracker = ConsoleTracker(total_steps=10, done_steps=4, stream=stream, clock=clock)
    tracker.note("resuming [run] at step 4")
    for step in (5, 6, 10):
        clock.seconds += 60
        tracker.log(METRICS, step)
    tracker.close()
    # One minute per step: after step 5 five are left, after step 6 four.
    assert stream.getvalue().splitlines() == [
        "resuming [run] at step 4",
        f"step 5/10  eta 0:05:00  {SUMMARY}",
        f"step 6/10  eta 0:04:00  {SUMMARY}",
        f"step 10/10  {SUMMARY}",
    ]


def test_the_estimate_leaves_out_the_time_before_step_1() -> None:
    stream, clock = io.StringIO(), Clock()
    tracker = ConsoleTracker(total_steps=10, stream=stream, clock=clock)
    clock.seconds += 3600  # a warm start
    tracker.log({}, 0)
    clock.seconds += 60
    tracker.log({}, 1)
    assert stream.getvalue().splitlines()[-1] == "step 1/10  eta 0:09:00"


def test_without_a_total_there_is_no_estimate() -> None:
    stream = io.StringIO()
    ConsoleTracker(stream=stream).log({}, 3)
    assert stream.getvalue() == "step 3\n"


def test_a_phase_prints_a_line_per_tenth() -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream=stream, clock=Clock())
    with tracker.progress("warm start", 25) as advance:
        for _ in range(25):
            advance()
    counts = [line.split()[2] for line in stream.getvalue().splitlines()]
    # 3/25 is the first count of at least a tenth.
    assert counts == ["3/25", "6/25", "9/25", "12/25", "15/25", "18/25", "21/25", "24/25", "25/25"]


def test_a_slow_phase_prints_a_line_every_fifteen_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    tracker = ConsoleTracker(stream=stream, clock=clock)
    with tracker.progress("evaluation", 1000) as advance:
        for _ in range(8):
            clock.seconds += 5
            advance()
    assert stream.getvalue().splitlines() == [
        "evaluation 3/1000  eta 1:23:05",  # 997 x 5 s
        "evaluation 6/1000  eta 1:22:50",
        "evaluation 8/1000  eta 1:22:40",
    ]


def test_a_phase_that_raises_prints_its_last_count() -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream=stream, clock=Clock())

    def evaluate() -> None:
        with tracker.progress("evaluation", 1000) as advance:
            advance()
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    assert stream.getvalue() == "evaluation 1/1000  eta 0:00:00\n"


def test_a_terminal_shows_bars_with_notes_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main, terminal = pty.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        tracker = ConsoleTracker(total_steps=10, stream=stream)
        tracker.log(METRICS, 10)
        tracker.note("a [sentence] above")
        with tracker.progress("warm start", 1) as advance:
            advance()
        tracker.close()
        stream.flush()
        shown = _read_all(main)
    os.close(main)
    assert "a [sentence] above" in shown
    assert "━━━━" in shown
    assert f"step 10/10  {SUMMARY}" in shown
    assert "warm start 1/1" in shown


def _read_all(terminal: int) -> str:
    """A terminal returns its output in pieces."""
    pieces = []
    while select.select([terminal], [], [], 0.5)[0]:
        pieces.append(os.read(terminal, 100_000))
    return b"".join(pieces).decode()
