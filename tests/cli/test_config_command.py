"""`skyfleet config show | explain | diff`."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from skyfleet.cli.config import config_app
from skyfleet.config.loading import load_config
from skyfleet.errors import ConfigError


def run(*args: str) -> str:
    result = CliRunner().invoke(config_app, args, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_show_prints_loadable_yaml_with_unsupported_values_as_comments(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {seed: 7, epochs: 3}")
    output = run("show", str(file), "trainer.epochs=4", "trainer.strategy=megatron")
    shown = load_config(output)
    assert (shown.trainer.seed, shown.trainer.epochs) == (7, 4)
    assert output.splitlines()[-1].startswith("# trainer.strategy='megatron' does not run")


def test_show_prints_the_warnings_of_a_run_as_comments() -> None:
    unused, flag = "trainer.algorithm.gamma=0.9", "generator.use_native_tool_calling=true"
    output = run("show", unused, flag)
    assert load_config(output) == load_config("", [unused, flag])
    logged = [line.partition(" while")[0] for line in output.splitlines() if line.startswith("# ")]
    assert logged == [f"# {flag} has no effect", f"# {unused} has no effect"]


def test_show_needs_no_file() -> None:
    assert load_config(run("show", "trainer.seed=3")).trainer.seed == 3
    assert load_config(run("show")) == load_config()


def test_explain_takes_a_key_a_section_or_nothing() -> None:
    assert run("explain", "trainer.seed") == "trainer.seed: int, at least 0 = 42\n"
    assert "trainer.warm_start.steps" in run("explain", "trainer.warm_start")
    assert "environment.env_class" in run("explain")


def test_diff_prints_the_keys_that_differ(tmp_path: Path) -> None:
    one, other = tmp_path / "a.yaml", tmp_path / "b.yaml"
    one.write_text("trainer: {seed: 1}")
    other.write_text("trainer: {seed: 2}")
    assert run("diff", str(one), str(other)) == "trainer.seed: 1 -> 2\n"


def test_a_config_error_is_raised_for_main_to_print() -> None:
    result = CliRunner().invoke(config_app, ["show", "trainer.sead=1"])
    assert isinstance(result.exception, ConfigError)
