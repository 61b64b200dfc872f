"""Arguments shared by commands: configuration files and overrides, dry runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.terminal import print

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig

ConfigArgs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE] [key=value]...", help="A YAML file or a preset, and overrides."),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="A further name that clients may use for this server; repeatable."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would happen, and stop.")]


def config_from(arguments: list[str] | None) -> RunConfig:
    """Load `[FILE or preset] key=value ...`."""
    from skyfleet.config.loading import load_config, load_config_file

    arguments = arguments or []
    if arguments and "=" not in arguments[0]:
        return load_config_file(arguments[0], arguments[1:])
    return load_config("", arguments)


def show_plan(config: RunConfig, sentences: Iterable[str]) -> None:
    """Print the resolved configuration, then what would happen and the warnings, as comments."""
    from skyfleet.config.keys import dump_yaml
    from skyfleet.config.warnings import warn_native_tool_calling

    print(dump_yaml(config), end="")
    lines = (*sentences, *warn_native_tool_calling(config))
    # Flushed, because an error may follow on stderr.
    print("\n".join(f"# {line}" for line in lines), flush=True)
