"""A finding stops the run or warns, is written to sentinels.jsonl, and shows in the metrics."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tests.fakes.alert_server import serve_alerts
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.small_runs import rows
from tests.sentinels.bugs_in_batches import verifiers_break
from tests.sentinels.bugs_in_tokens import last_token_is_masked
from tests.sentinels.bugs_in_weights import engines_keep_their_version
from tests.sentinels.planted import Plant, read_findings, run_steps, start_run

from skyfleet.checkpoints.resume import find_checkpoint
from skyfleet.config.loading import load_config
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import ConfigError, NoLearningSignalError, SentinelError
from skyfleet.sentinels.recording_engine import RecordingEngine
from skyfleet.sentinels.registry import build_modes
from skyfleet.trainer.loops import train

MODE = "trainer.sentinels.mode"
MODES = "trainer.sentinels.modes"


async def run_with_bug(folder: Path, plant: Plant, *settings: str, steps: int = 1) -> None:
    run = await start_run(folder, *settings)
    try:
        with pytest.MonkeyPatch.context() as patch:
            plant(run, patch)
            await run_steps(run, steps)
    finally:
        run.log.close()
        await run.alerts.close()


async def test_a_broken_invariant_stops_the_run_with_name_sentence_and_evidence(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        SentinelError,
        match=r"^sentinel loss_mask, step 1: tokens that the policy sampled would not be trained "
        r"on \(task=github-.*sampled=\d+, masked=\d+, both=\d+\)\. All findings are in "
        r".*sentinels\.jsonl; to continue despite it, set trainer\.sentinels\.modes\.loss_mask=warn",
    ):
        await run_with_bug(tmp_path, last_token_is_masked, f"{MODE}=stop")
    (row,) = map(json.loads, (tmp_path / "sentinels.jsonl").read_text().splitlines())
    assert (row["step"], row["sentinel"], row["mode"]) == (1, "loss_mask", "stop")
    assert row["evidence"]["masked"] < row["evidence"]["sampled"]
    assert rows(tmp_path) == []


async def test_a_warning_is_one_alert_and_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_alerts() as server, caplog.at_level(logging.WARNING, "skyfleet.sentinels"):
        settings = (f"{MODE}=stop", f"trainer.alerts.webhook_url={server.url}")
        await run_with_bug(tmp_path, verifiers_break, *settings, steps=2)
    (post,) = server.posts
    assert (post["kind"], post["key"], post["step"]) == ("sentinel", "sentinel/unknown_grades", 1)
    assert post["text"].startswith("more than 25%")
    assert [finding.step for finding in read_findings(tmp_path)] == [1, 2]
    warnings = [r for r in caplog.records if r.name == "skyfleet.sentinels.checker"]
    assert len(warnings) == 1
    assert "unknown_grades, step 1: more than 25%" in warnings[0].getMessage()


async def test_a_run_without_any_grade_stops_with_the_first_grading_error(tmp_path: Path) -> None:
    with pytest.raises(
        SentinelError,
        match=r"^sentinel nothing_graded, step 3: for 3 steps .*first=VerifierError: ",
    ):
        await run_with_bug(tmp_path, verifiers_break, f"{MODE}=stop", steps=5)
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
async def test_a_run_that_stops_for_missing_grades_saves_a_checkpoint(
    tmp_path: Path, settings: tuple[str, ...], why: str, step: int
) -> None:
    run = await start_run(tmp_path, f"{MODE}=stop", *settings)
    await run_steps(run, 2)
    with pytest.MonkeyPatch.context() as patch:
        verifiers_break(run, patch)
        with pytest.raises(NoLearningSignalError, match=why):
            await train(run)
    run.log.close()
    checkpoint = find_checkpoint(tmp_path / "checkpoints", "latest")
    assert checkpoint is not None
    assert checkpoint.step == step


async def test_a_warning_stops_the_run_if_its_mode_says_so(tmp_path: Path) -> None:
    with pytest.raises(SentinelError, match=r"^sentinel unknown_grades"):
        await run_with_bug(tmp_path, verifiers_break, f"{MODES}.unknown_grades=stop")


async def test_a_finding_stays_in_the_metrics_of_later_steps(tmp_path: Path) -> None:
    run = await start_run(tmp_path, f"{MODES}.limits=off")
    with pytest.MonkeyPatch.context() as patch:
        last_token_is_masked(run, patch)
        await run_steps(run, 1)
    await run_steps(run, 1)
    run.log.close()
    assert [row["sentinel/loss_mask"] for row in rows(tmp_path)] == [1.0, 1.0]
    assert [row["sentinel/sampled_tokens"] for row in rows(tmp_path)] == [0.0, 0.0]
    assert all("sentinel/limits" not in row for row in rows(tmp_path))


async def test_a_finding_of_a_sync_is_in_the_row_of_the_next_step(tmp_path: Path) -> None:
    """The row of a step is complete before its weights are synced."""
    await run_with_bug(tmp_path, engines_keep_their_version, steps=2)
    found = [finding for finding in read_findings(tmp_path) if finding.sentinel == "served_version"]
    assert [finding.step for finding in found] == [1, 2]
    assert [row["sentinel/served_version"] for row in rows(tmp_path)] == [0.0, 1.0]


async def test_nothing_is_checked_when_all_is_off(tmp_path: Path) -> None:
    await run_with_bug(tmp_path, last_token_is_masked, f"{MODE}=off")
    assert read_findings(tmp_path) == []
    assert not [key for key in rows(tmp_path)[0] if key.startswith("sentinel/")]


def test_an_unknown_sentinel_is_refused_with_the_known_names() -> None:
    config = load_config("", [f"{MODES}.entropy=stop"])
    with pytest.raises(ConfigError, match=r"modes\.entropy is not a sentinel; choose from \['adv"):
        build_modes(config.trainer.sentinels)


def test_an_unknown_mode_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.sentinels\.mode='halt': it takes stop \| "):
        load_config("", [f"{MODE}=halt"])


async def test_an_aborted_completion_does_not_count_as_lost() -> None:
    engine = RecordingEngine(ScriptedEngine("I will ca", finish="abort"))
    await engine.generate([1, 2], SamplingParams(), session="t/0")
    assert engine.drain([]) == ((), 0)
