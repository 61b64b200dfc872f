"""A `.wandb` file of W&B's own client is read back, also if it is cut or damaged."""

from __future__ import annotations

import struct
import sys
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from tests.fakes.wandb_server import serve_wandb

from skyfleet.cli.main import app
from skyfleet.config.tracking import Wandb
from skyfleet.errors import ConfigError
from skyfleet.tracking.wandb_file import (
    BLOCK_BYTES,
    HEADER,
    is_tracked_run,
    read_records,
    read_tracked_run,
    read_wandb_file,
)
from skyfleet.tracking.wandb_tracker import WandbTracker

KEY = "reward/github/variance_per_prompt"


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rows and a long text, which spans several blocks."""
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("MODALITY", "tool_use")
        patch.setenv("WANDB_API_KEY_TOOL_USE", "f" * 40)
        wandb.teardown()
        tracker = WandbTracker(
            folder,
            project_name="p",
            run_name="r",
            config={"lr": 1e-6, "long": "x" * (3 * BLOCK_BYTES)},
            resume_step=7,
            settings=Wandb(entity={"tool_use": "team", "computer_use": "others"}),
        )
        for step, variance in enumerate((0.0, 0.25, 0.0, 0.0), start=8):
            metrics = {KEY: variance, "reward/github/pass_at_4": 0.05, "kl": float("nan")}
            tracker.log(metrics, step)
        tracker.attach("results.md", "| a table |")
        tracker.close()
        wandb.teardown()
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for _ in range(100):  # another process writes the file
        if len(read_wandb_file(path).rows) == 4:
            break
        time.sleep(0.1)
    return path


@pytest.mark.parametrize("is_folder", [False, True])
def test_config_rows_and_end_are_read_back(offline_run: Path, is_folder: bool) -> None:
    address = str(offline_run.parent if is_folder else offline_run)
    assert is_tracked_run(address)
    run = read_tracked_run(address)
    assert (run.name, run.is_finished) == ("r", True)
    assert run.config["lr"] == 1e-6
    assert len(run.config["long"]) == 3 * BLOCK_BYTES
    assert [(row["_step"], row[KEY]) for row in run.rows] == [(8, 0), (9, 0.25), (10, 0), (11, 0)]
    assert all("kl" not in row for row in run.rows)


def test_the_api_key_is_not_stored_and_files_are_attached(offline_run: Path) -> None:
    stored = b"".join(p.read_bytes() for p in offline_run.parent.rglob("*") if p.is_file())
    assert b"f" * 40 not in stored
    assert b"team" in stored
    assert b"others" not in stored
    assert (offline_run.parent / "files" / "results.md").read_text() == "| a table |"


def test_the_command_shows_the_signal_of_the_file(
    offline_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app(["analyze", str(offline_run)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "| github      |     4 | 0.0625" in shown
    assert (
        "github: 25 % of 4 steps have a learning signal, but 0 % of the last quarter: "
        "too hard for the current model" in shown
    )
    with pytest.raises(ConfigError, match="--eval-set and --step select episodes"):
        app(["analyze", str(offline_run), "--step", "1"], standalone_mode=False)


@pytest.mark.parametrize("n_lost", [1, 5, 100, 2000])
def test_a_file_that_is_cut_ends_before_the_cut(
    offline_run: Path, tmp_path: Path, n_lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run-1.wandb"
    path.write_bytes(offline_run.read_bytes()[:-n_lost])
    whole = list(read_records(offline_run))
    kept = list(read_records(path))
    assert kept == whole[: len(kept)]
    assert len(kept) < len(whole)
    assert not caplog.records


def write_fragments(path: Path, *fragments: tuple[int, bytes]) -> None:
    parts = [
        struct.pack("<IHB", crc32(data, crc32(bytes([kind]))), len(data), kind) + data
        for kind, data in fragments
    ]
    path.write_bytes(HEADER + b"".join(parts))


def test_a_damaged_block_is_left_out_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.wandb"
    first = BLOCK_BYTES - len(HEADER) - 7 - 9  # the record before it takes 9 bytes with its frame
    write_fragments(path, (1, b"on"), (2, b"x" * first), (4, b"y"), (1, b"three"))
    assert [len(record) for record in read_records(path)] == [2, first + 1, 5]
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    assert list(read_records(path)) == [b"on", b"three"]
    assert "block 1 is damaged" in caplog.text


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.wandb"
    path.write_text("hello")
    with pytest.raises(ConfigError, match=r"notes\.wandb is not a \.wandb file"):
        read_wandb_file(path)


def test_only_wandb_addresses_and_files_are_tracked_runs() -> None:
    assert is_tracked_run("wandb://team/project/run")
    assert is_tracked_run("runs/a/wandb/offline-run-1/run-1.wandb")
    assert not is_tracked_run("runs/a")
    for address in ("wandb://project/run", "wandb://a", "wandb://a/b/c/d", "wandb://a/b/group/c/d"):
        with pytest.raises(ConfigError, match="write wandb://entity/project/run"):
            read_tracked_run(address)


def test_an_online_run_and_its_group_are_read_through_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    first: list[dict[str, Any]] = [
        {"_step": 1, KEY: 0.1, "note": "text"},
        {"_step": 2, KEY: 0.0},
        {"_step": 3, KEY: 0.0},
    ]
    resumed: list[dict[str, Any]] = [{"_step": 3, KEY: 0.2}, {"_step": 4}]
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    wandb.teardown()
    with serve_wandb(abc=first, abd=resumed) as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        run = read_tracked_run("wandb://team/project/abc")
        whole = read_tracked_run("wandb://team/project/group/g")
        app(["analyze", "wandb://team/project/group/g"], standalone_mode=False)
        with pytest.raises(ConfigError, match=r"wandb://team/project/other: .*; check the address"):
            read_tracked_run("wandb://team/project/other")
        with pytest.raises(ConfigError, match="no run of this group"):
            read_tracked_run("wandb://team/project/group/other")
        wandb.teardown()
    assert (run.name, run.is_finished) == ("fleet_tool_use_0123abcd", False)
    assert run.config == {"lr": 1e-6}
    assert [(row["_step"], row[KEY]) for row in run.rows] == [(1, 0.1), (2, 0), (3, 0)]
    # The resumed run repeats step 3.
    assert whole.rows == (*run.rows[:2], {"_step": 3.0, KEY: 0.2}, {"_step": 4.0})
    assert (whole.name, whole.is_finished) == ("g", True)
    assert "github: 67 % of 3 steps have a learning signal" in capsys.readouterr().out


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb.proto", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    for address in ("a.wandb", "wandb://a/b/c"):
        with pytest.raises(ImportError, match=r"\.\[wandb\]"):
            read_tracked_run(address)


def test_entity_and_project_need_the_modality(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODALITY", raising=False)
    settings = Wandb(project={"tool_use": "a"})
    for modality, sentence in ((None, "is not known; set trainer"), ("both", "no value for the")):
        with pytest.raises(ConfigError, match=rf"trainer\.wandb\.project.*{sentence}"):
            WandbTracker(
                tmp_path,
                project_name="p",
                run_name="r",
                config={},
                settings=settings.model_copy(update={"modality": modality}),
            )
    assert list(tmp_path.iterdir()) == []
