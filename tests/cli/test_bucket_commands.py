"""analyze, report, view, diff and log read runs and SkyRL's dumps in a bucket."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from tests.fakes.buckets import serve_s3, use_bucket
from tests.fakes.small_runs import small_config
from typer.testing import CliRunner

from skyfleet.analysis.dump_import import IMPORTED, import_dumps
from skyfleet.analysis.run_folder import open_run
from skyfleet.api.runs import load_run
from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.checkpoints.saving import save_checkpoint
from skyfleet.cli.agents import find_policy_folder
from skyfleet.cli.analyze import analyze_command
from skyfleet.cli.audit import audit_command
from skyfleet.cli.compare import compare_command
from skyfleet.cli.diff import diff_command
from skyfleet.cli.log import log_command
from skyfleet.cli.report import report_command
from skyfleet.config.keys import dump_yaml
from skyfleet.config.loading import load_config
from skyfleet.errors import ConfigError
from skyfleet.storage.objects import delete_object, write_object
from skyfleet.trainer.dry_run import plan_dry_run

DUMPS = Path(__file__).parents[1] / "assets" / "dumped_evals"

app = typer.Typer()
app.command("analyze")(analyze_command)
app.command("audit")(audit_command)
app.command("compare")(compare_command)
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
    write_object(f"{bucket}/training/first/global_step_1.jsonl", b"{}")
    with pytest.raises(ConfigError, match=rf"{bucket}/training/first is not a run: "):
        load_run(f"{bucket}/training/first")
    import_dumps(DUMPS, Path("team"))
    shutil.rmtree("team/trajectories")
    upload(Path("team"), f"{bucket}/team")
    with pytest.raises(ConfigError, match=rf"{bucket}/team has no evaluation episodes yet"):
        run_command("diff", f"{bucket}/team")


def test_a_checkpoint_in_a_bucket_is_fetched_without_its_optimizer(
    bucket: str, tmp_path: Path
) -> None:
    class Weights:
        def save(self, folder: Path) -> None:
            for name in ("config.json", "optimizer.pt"):
                (folder / name).write_text(name)

        def load(self, folder: Path) -> None: ...

    address = f"{bucket}/skyfleet/tiny/first"
    for step in (4, 8):
        saved = save_checkpoint(tmp_path / "gone", step, {"policy": Weights()})
        BucketCheckpoints(address=address).upload(saved)
    keys = [f"trainer.ckpt_bucket={bucket}", "trainer.run_name=first"]
    config = small_config(tmp_path / "empty", *keys)
    from_path = "trainer.resume_mode=from_path"
    resumed = small_config(
        tmp_path / "empty", from_path, f"trainer.resume_path={address}/global_step_4"
    )
    expected = {
        find_policy_folder(config, f"{address}/global_step_4"): 4,
        find_policy_folder(resumed, None): 4,
        find_policy_folder(config, address): 8,
        find_policy_folder(config, None): 8,
    }
    assert {folder.parent.name for folder in expected if folder} == {
        "global_step_4",
        "global_step_8",
    }
    for folder, step in expected.items():
        assert folder is not None
        assert folder.parent.name == f"global_step_{step}"
        assert [path.name for path in folder.iterdir()] == ["config.json"]
    with pytest.raises(ConfigError, match=r"global_step_5 has no complete checkpoint; name"):
        find_policy_folder(config, f"{address}/global_step_5")


def test_runs_and_reports_in_a_bucket_are_compared(bucket: str, tmp_path: Path) -> None:
    import_dumps(DUMPS, tmp_path / "team")
    upload(tmp_path / "team", f"{bucket}/runs/team")
    first, *_, last = sorted((tmp_path / "team" / "reports").rglob("val.json"))
    local = run_command("compare", str(tmp_path / "team"))
    assert run_command("compare", f"{bucket}/runs/team") == local
    addresses = [f"{bucket}/runs/team/{p.relative_to(tmp_path / 'team')}" for p in (first, last)]
    assert run_command("compare", *addresses) == run_command("compare", str(first), str(last))


def test_a_model_at_an_address_is_refused_with_the_command_that_copies_it(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.policy.model.path=s3://b/run/global_step_8/policy")
    sentence = (
        r"trainer\.policy\.model\.path='s3://b/run/global_step_8/policy' is an address, .*"
        r"`aws s3 cp --recursive s3://b/run/global_step_8/policy models/policy`"
    )
    assert any(re.search(sentence, problem) for problem in plan_dry_run(config).problems)


def test_a_run_without_its_episodes_names_the_address_that_has_them(
    bucket: str, tmp_path: Path
) -> None:
    import_dumps(DUMPS, tmp_path / "team")
    keys = ["trainer.trajectory_bucket=episodes", "trainer.run_name=team"]
    (tmp_path / "team" / "config.yaml").write_text(dump_yaml(load_config("", keys)))
    for name in (IMPORTED, "trajectories"):
        path = tmp_path / "team" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    address = f"{bucket}/skyfleet/tiny/team"
    upload(tmp_path / "team", f"{address}/run")
    sentence = rf"{address} has no episodes \(val steps .*\); .* in s3://episodes/runs/team"
    for command in ("analyze", "audit"):
        with pytest.raises(ConfigError, match=sentence):
            run_command(command, address)
    entry = run_command("log", address)
    assert re.search(rf"Incomplete: {sentence}", entry)
    assert "No evaluation episodes are recorded here." in entry
    assert "No failures." not in entry
