"""analyze, report, view, diff and log read runs and SkyRL's dumps in a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from tests.fakes.buckets import serve_s3, use_bucket
from typer.testing import CliRunner

from skyfleet.analysis.dump_import import import_dumps
from skyfleet.analysis.run_folder import open_run
from skyfleet.api.runs import load_run
from skyfleet.cli.analyze import analyze_command
from skyfleet.cli.diff import diff_command
from skyfleet.cli.log import log_command
from skyfleet.cli.report import report_command
from skyfleet.errors import ConfigError
from skyfleet.storage.objects import delete_object, write_object

DUMPS = Path(__file__).parents[1] / "assets" / "dumped_evals"

app = typer.Typer()
app.command("analyze")(analyze_command)
app.command("diff")(diff_command)
app.command("log")(log_command)
app.command("report")(report_command)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serve_s3() as url:
        yield url


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return f"{use_bucket(monkeypatch, endpoint, 'analysed')}/{tmp_path.name}"


def upload(folder: Path, address: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            write_object(f"{address}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def run_command(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("kind", ["dumps", "run"])
def test_commands_print_what_they_print_for_local_files(
    bucket: str, tmp_path: Path, kind: str
) -> None:
    local, address = tmp_path / "team", f"{bucket}/{kind}/team"
    import_dumps(DUMPS, local)
    upload(DUMPS if kind == "dumps" else local, address)
    for command in (["analyze", "--json"], ["diff"], ["log"]):
        assert run_command(*command, address) == run_command(*command, str(local))
    assert "report.html" in run_command("report", address)
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_one_step_of_dumps_is_read(bucket: str) -> None:
    step = sorted(DUMPS.glob("global_step_*"))[0]
    upload(step, f"{bucket}/evals/team/{step.name}")
    run = load_run(f"{bucket}/evals/team/{step.name}")
    assert run.name == "team"
    assert len(run.trajectories()) > 0


def test_a_cached_run_follows_its_bucket(bucket: str, tmp_path: Path) -> None:
    local, address = tmp_path / "team", f"{bucket}/team"
    import_dumps(DUMPS, local)
    upload(local, address)
    assert open_run(address).metrics() == []
    write_object(f"{address}/metrics.jsonl", b'{"step": 0}\n')
    assert open_run(address).metrics() == [{"step": 0}]
    delete_object(f"{address}/metrics.jsonl")
    assert open_run(address).metrics() == []


def test_an_address_without_a_run_is_one_sentence(bucket: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a run: .*pass s3://bucket/runs/<run_name>"):
        load_run(f"{bucket}/nothing")
