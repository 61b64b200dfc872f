"""What is measured on this machine, and what a profile of it predicts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.fakes.small_runs import small_config
from typer.testing import CliRunner

from skyfleet.cli.main import app
from skyfleet.errors import ConfigError
from skyfleet.simulation import quiet_clock
from skyfleet.simulation.machine_plan import build_machine_system, simulate_machine
from skyfleet.simulation.machine_profile import (
    MachineProfile,
    interpolate,
    read_machine_profile,
    write_profile,
)
from skyfleet.simulation.measure import fit_line, measure_machine
from skyfleet.simulation.quiet_clock import read_core_wait
from skyfleet.simulation.recorded_workload import split_turns
from skyfleet.simulation.workload import Workload

OVERRIDES = ("trainer.warm_start.steps=0", "data.val_data=[]", "generator.sampling_params.stop=[]")


def make_profile(**changes: object) -> MachineProfile:
    values = {
        "machine": "a machine", "model": "tiny", "backend": "embedded", "is_async": False,
        "decode_seconds": {1: 1.0}, "context_seconds": 0.0, "prefill_token_seconds": 0.0,
        "turn_seconds": 2.0, "episode_seconds": 3.0, "update_fixed_seconds": 1.0,
        "update_token_seconds": 0.1, "push_seconds": 0.5, "fixed_token_seconds": 0.05,
        "workload": Workload(source="a test", recorded=[[(5, 5)]]),
    }  # fmt: skip
    return MachineProfile.model_validate(values | changes)


def test_a_step_of_a_measured_machine_by_hand(tmp_path: Path) -> None:
    """8 episodes of one turn: 16 s and 24 s of their process, which is also the engine's; between
    them 4 more tokens at 1 s. 80 tokens: 4 s of checks, 1 + 8 s to learn, 0.5 s for the weights."""
    config = small_config(tmp_path, *OVERRIDES)
    (first, *_) = simulate_machine(config, make_profile(), make_profile().workload)
    step = first.steps[0]
    assert step.rollout_seconds == pytest.approx(16 + 4 + 24)
    assert step.learn_seconds == pytest.approx(9)
    assert first.step_seconds == pytest.approx(16 + 4 + 24 + 4 + 9 + 0.5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "smollm2"}, "--profile is of smollm2"),
        ({"is_async": True}, "measured with trainer.fully_async.enabled=true"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    profile = make_profile(**changes)
    with pytest.raises(ConfigError, match=sentence):
        build_machine_system(small_config(tmp_path), profile, profile.workload, n_steps=1)


async def test_measuring_leaves_nothing_behind_and_its_profile_plans_the_run(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path / "run", *OVERRIDES, "trainer.algorithm.use_kl_loss=false")
    profile = await measure_machine(config)
    assert os.listdir(tmp_path) == []
    assert profile.model == "tiny"
    assert all(seconds > 0 for seconds in profile.decode_seconds.values())
    # Which of the three a busy machine's times are fitted by is chance.
    costs = (
        profile.update_fixed_seconds,
        profile.update_token_seconds,
        profile.update_square_seconds,
    )
    assert min(costs) >= 0 < max(costs)
    assert profile.turn_seconds > 0
    assert 1 <= max(len(episode) for episode in profile.workload.recorded) <= 8
    assert (profile.engine_slowdown, profile.learner_slowdown) == (1.0, 1.0)
    path = tmp_path / "profile.json"
    write_profile(path, profile)
    assert read_machine_profile(path) == profile


def test_a_machines_profile_is_for_one_machine(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, make_profile())
    arguments = ["plan", "tiny", "--gpus", "2", "--profile", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert "is of one machine; use --gpus 1" in str(result.exception)


def test_vllm_is_not_measured() -> None:
    result = CliRunner().invoke(app, ["plan", "qwen3_8b_8xh200", "--measure"])
    assert "--measure measures the embedded engine" in str(result.exception)


def test_turns_are_read_from_the_tokens_that_were_sampled() -> None:
    """A prompt of 3, 2 sampled, a reply of 1, 1 sampled, and a reply that no turn follows."""
    mask = [False] * 3 + [True] * 2 + [False] + [True] + [False] * 2
    assert split_turns(mask) == [(3, 2), (1, 1)]


def test_values_between_measured_points_lie_on_a_line() -> None:
    assert interpolate({1: 1.0, 3: 2.0, 7: 2.0}, 2) == pytest.approx(1.5)
    assert interpolate({1: 1.0, 3: 2.0}, 5) == pytest.approx(3.0)


def test_a_fitted_line_has_no_negative_part() -> None:
    assert fit_line([(1, 3.0), (2, 5.0)]) == pytest.approx((1, 2))
    assert fit_line([(1, 1.0), (2, 3.0)])[0] == pytest.approx(0, abs=1e-9)
    assert fit_line([(1, 3.0), (2, 1.0)]) == pytest.approx((2, 0))


def test_the_quiet_clock_leaves_waits_for_a_core_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s by the wall the main thread waited 1 s and the learner's thread 3 s."""
    learner = threading.Thread(target=threading.Event().wait, name="learner_0", daemon=True)
    waits = {threading.main_thread(): 1.0, learner: 3.0}
    monkeypatch.setattr(quiet_clock, "perf_counter", lambda: 10.0)
    monkeypatch.setattr(
        quiet_clock, "read_core_wait", lambda thread=None: waits[thread or threading.main_thread()]
    )
    monkeypatch.setattr(quiet_clock, "find_learner_thread", lambda: None)
    assert quiet_clock.read_quiet_clock() == 9.0
    monkeypatch.setattr(quiet_clock, "find_learner_thread", lambda: learner)
    assert quiet_clock.read_quiet_clock() == 7.0


def test_a_thread_waits_for_a_core_or_nothing_is_known_of_it() -> None:
    assert read_core_wait() >= 0
    assert read_core_wait(threading.Thread(target=print)) == 0  # never started
