"""`skyfleet config`: show, explain and compare configurations."""

from __future__ import annotations

from typing import Annotated

import typer

from skyfleet.cli.arguments import ConfigArgs, DryRun, config_from, show_plan

config_app = typer.Typer(
    name="config", help="Show, explain and compare configurations.", no_args_is_help=True
)


@config_app.command("show")
def show_command(words: ConfigArgs = None, dry_run: DryRun = False) -> None:
    """Print the whole configuration, what in it cannot run yet, and what is seldom meant."""
    from skyfleet.config.explain import as_yaml
    from skyfleet.config.rules import unsupported
    from skyfleet.config.turn_rules import lone_native_flag
    from skyfleet.config.warnings import remarks

    config = config_from(words)
    if dry_run:
        show_plan(config, ["would print this"])
        return
    print(as_yaml(config), end="")
    for sentence in (*unsupported(config), *lone_native_flag(config), *remarks(config)):
        print(f"# {sentence}")


@config_app.command("explain")
def explain_command(key: Annotated[str, typer.Argument()] = "", dry_run: DryRun = False) -> None:
    """Print what a key means, or the keys of a section."""
    from skyfleet.config.explain import explain

    explained = explain(key)
    print(f"would explain {key or 'every section'}" if dry_run else explained)


@config_app.command("diff")
def diff_command(a: str, b: str, dry_run: DryRun = False) -> None:
    """Print the keys in which two configuration files differ."""
    from skyfleet.config.explain import diff
    from skyfleet.config.loading import load_config_file

    differing = diff(load_config_file(a), load_config_file(b))
    if dry_run:
        print(f"would print {len(differing)} keys")
        return
    for key, (one, other) in differing.items():
        print(f"{key}: {one!r} -> {other!r}")
