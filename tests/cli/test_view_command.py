"""`skyfleet view` serves a run on localhost until it is interrupted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.analysis.viewer_run import write_run

from skyfleet.cli.view import view_command
from skyfleet.errors import ConfigError
from skyfleet.trajectories.records import RecordError

# Background jobs of a shell and their children ignore SIGINT.
SCRIPT = """
import signal, typer
signal.signal(signal.SIGINT, signal.default_int_handler)
from skyfleet.cli.view import view_command
typer.run(view_command)
"""


def test_view_prints_its_address_answers_and_exits_on_an_interrupt(tmp_path: Path) -> None:
    run = write_run(tmp_path, plain=4)
    command = [sys.executable, "-c", SCRIPT, str(run), "--episode", "train/1/2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        logged = viewer.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/", logged)
        assert url is not None
        try:
            assert logged == f"serving {run} at {url[0]}#episode=train/1/2\n"
            assert httpx.get(f"{url[0]}api/run").json()["total"] == 12
            viewer.send_signal(signal.SIGINT)
            assert viewer.wait(timeout=20) == 0
        finally:
            viewer.kill()


def test_a_missing_episode_is_a_record_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"'train/1/9': .* has no such episode"):
        view_command(str(write_run(tmp_path, plain=4)), episode="train/1/9")


def test_a_folder_that_is_no_run_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        view_command(str(tmp_path))


def test_the_viewer_needs_no_torch() -> None:
    code = "import sys, skyfleet.analysis.viewer.server; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
