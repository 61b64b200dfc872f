"""A finding stops the run or warns, is written down, and shows in the metrics from then on."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.small_runs import rows
from tests.sentinels.bugs_in_batches import verifiers_break
from tests.sentinels.bugs_in_tokens import last_token_is_masked
from tests.sentinels.bugs_in_weights import engines_keep_their_version
from tests.sentinels.planted import Plant, begun, go_on, said

from skyfleet.checkpoints.resume import find_checkpoint
from skyfleet.config.loading import load_config
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import ConfigError, NoLearningSignalError, SentinelError
from skyfleet.sentinels.recording_engine import RecordingEngine
from skyfleet.sentinels.registry import build_modes
from skyfleet.trainer.loop import train

MODE = "trainer.sentinels.mode"
MODES = "trainer.sentinels.modes"


async def played(folder: Path, plant: Plant, *settings: str, steps: int = 1) -> None:
    run = await begun(folder, *settings)
    try:
        with pytest.MonkeyPatch.context() as patch:
            plant(run, patch)
            await go_on(run, steps)
    finally:
        run.log.close()


async def test_a_broken_promise_stops_the_run_with_name_sentence_and_evidence(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        SentinelError,
        match=r"^sentinel loss_mask, step 1: tokens that the policy sampled would not be trained "
        r"on \(task=github-.*sampled=\d+, masked=\d+, both=\d+\)\. All findings are in "
        r".*sentinels\.jsonl; trainer\.sentinels\.modes\.loss_mask=warn goes on",
    ):
        await played(tmp_path, last_token_is_masked, f"{MODE}=stop")
    (row,) = map(json.loads, (tmp_path / "sentinels.jsonl").read_text().splitlines())
    assert (row["step"], row["sentinel"], row["mode"]) == (1, "loss_mask", "stop")
    assert row["evidence"]["masked"] < row["evidence"]["sampled"]
    assert rows(tmp_path) == []


async def test_what_is_only_a_sign_warns_where_promises_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "skyfleet.sentinels"):
        await played(tmp_path, verifiers_break, f"{MODE}=stop", steps=2)
    assert [finding.step for finding in said(tmp_path)] == [1, 2]
    warnings = [r for r in caplog.records if r.name == "skyfleet.sentinels.checker"]
    assert len(warnings) == 1
    assert "unknown_grades, step 1: more than 25%" in warnings[0].getMessage()


async def test_a_run_whose_every_episode_fails_stops_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        SentinelError,
        match=r"^sentinel nothing_graded, step 3: for 3 steps .*first=VerifierError: ",
    ):
        await played(tmp_path, verifiers_break, f"{MODE}=stop", steps=5)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "why", "step"),
    [
        ((), "nothing_graded, step 5: .*VerifierError: Environment is not defined", 4),
        (
            ("trainer.algorithm.dynamic_sampling.type=filter",),
            "max_sample_batches=30 .*attempts have no grade; the first: VerifierError: Env",
            2,
        ),
    ],
)
async def test_what_was_learnt_before_environments_went_away_is_saved(
    tmp_path: Path, settings: tuple[str, ...], why: str, step: int
) -> None:
    run = await begun(tmp_path, f"{MODE}=stop", *settings)
    await go_on(run, 2)
    with pytest.MonkeyPatch.context() as patch:
        verifiers_break(run, patch)
        with pytest.raises(NoLearningSignalError, match=why):
            await train(run)
    run.log.close()
    checkpoint = find_checkpoint(tmp_path / "checkpoints", "latest")
    assert checkpoint is not None
    assert checkpoint.step == step


async def test_a_sign_stops_where_it_is_told_to(tmp_path: Path) -> None:
    with pytest.raises(SentinelError, match=r"^sentinel unknown_grades"):
        await played(tmp_path, verifiers_break, f"{MODES}.unknown_grades=stop")


async def test_a_warned_run_goes_on_and_its_metrics_remember(tmp_path: Path) -> None:
    run = await begun(tmp_path, f"{MODES}.limits=off")
    with pytest.MonkeyPatch.context() as patch:
        last_token_is_masked(run, patch)
        await go_on(run, 1)
    await go_on(run, 1)
    run.log.close()
    assert [row["sentinel/loss_mask"] for row in rows(tmp_path)] == [1.0, 1.0]
    assert [row["sentinel/sampled_tokens"] for row in rows(tmp_path)] == [0.0, 0.0]
    assert all("sentinel/limits" not in row for row in rows(tmp_path))


async def test_what_a_sync_got_wrong_is_in_the_row_of_the_next_step(tmp_path: Path) -> None:
    """A step is kept before its weights travel, and so is its row."""
    await played(tmp_path, engines_keep_their_version, steps=2)
    found = [finding for finding in said(tmp_path) if finding.sentinel == "served_version"]
    assert [finding.step for finding in found] == [1, 2]
    assert [row["sentinel/served_version"] for row in rows(tmp_path)] == [0.0, 1.0]


async def test_nothing_is_looked_at_when_all_is_off(tmp_path: Path) -> None:
    await played(tmp_path, last_token_is_masked, f"{MODE}=off")
    assert said(tmp_path) == []
    assert not [key for key in rows(tmp_path)[0] if key.startswith("sentinel/")]


def test_a_sentinel_that_does_not_exist_is_refused_by_name() -> None:
    config = load_config("", [f"{MODES}.entropy=stop"])
    with pytest.raises(ConfigError, match=r"modes\.entropy is no sentinel; choose from \['adv"):
        build_modes(config.trainer.sentinels)


def test_a_mode_that_does_not_exist_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.sentinels\.mode='halt': it takes stop \| "):
        load_config("", [f"{MODE}=halt"])


async def test_half_a_turn_is_not_missed_in_any_episode() -> None:
    witness = RecordingEngine(ScriptedEngine("I will ca", finish="abort"))
    await witness.generate([1, 2], SamplingParams(), session="t/0")
    assert witness.drain([]) == ((), 0)
