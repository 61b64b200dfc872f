"""`skyfleet config`: show, explain and compare configurations."""

from __future__ import annotations

from typing import Annotated

import typer

from skyfleet.cli.arguments import ConfigArgs, config_from
from skyfleet.terminal import print

config_app = typer.Typer(
    name="config", help="Show, explain and compare configurations.", no_args_is_help=True
)


@config_app.command("show")
def show_command(config_args: ConfigArgs = None) -> None:
    """Print the whole configuration, then unsupported values and warnings."""
    from skyfleet.config.keys import dump_yaml
    from skyfleet.config.validation import find_unsupported_values
    from skyfleet.config.warnings import warn_native_tool_calling
    from skyfleet.trainer.preflight import find_training_warnings

    config = config_from(config_args)
    print(dump_yaml(config), end="")
    for sentence in (
        *find_unsupported_values(config),
        *warn_native_tool_calling(config),
        *find_training_warnings(config),
    ):
        print(f"# {sentence}")


@config_app.command("explain")
def explain_command(key: Annotated[str, typer.Argument()] = "") -> None:
    """Print what a key means, or the keys of a section."""
    from skyfleet.config.keys import explain

    print(explain(key))


@config_app.command("diff")
def diff_command(a: str, b: str) -> None:
    """Print the keys in which two configuration files differ."""
    from skyfleet.config.keys import diff
    from skyfleet.config.loading import load_recorded_config

    differing = diff(load_recorded_config(a), load_recorded_config(b))
    for key, (one, other) in differing.items():
        print(f"{key}: {one!r} -> {other!r}")
