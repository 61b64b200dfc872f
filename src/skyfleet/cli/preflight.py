"""`skyfleet preflight`: try everything that a run needs, and list all that is missing at once."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from skyfleet.cli.arguments import ConfigArgs, config_from
from skyfleet.cli.exiting import exit_at_once
from skyfleet.errors import ConfigError
from skyfleet.terminal import print


def preflight_command(
    config_args: ConfigArgs = None,
    skip: Annotated[
        str,
        typer.Option(
            help="Groups to leave out, separated by commas: configuration, keys, machine, storage, "
            "data, environment, policy."
        ),
    ] = "",
    timeout_seconds: Annotated[
        float, typer.Option(min=0, help="Per check; 0 gives each its own limit.")
    ] = 0,
) -> None:
    """Check keys, buckets, disk, GPU, versions, data, environments and the policy before a run.

    Exits after all of them: with code 1 if a check failed, with 75 if every failure is of a service that
    does not answer.
    """
    from skyfleet.preflight.check import GROUPS, Outcome
    from skyfleet.preflight.run import run_preflight
    from skyfleet.preflight.table import format_table

    groups = [name.strip() for name in skip.split(",") if name.strip()]
    if unknown := [name for name in groups if name not in GROUPS]:
        raise ConfigError(f"--skip {unknown[0]} is unknown; use some of {', '.join(GROUPS)}")
    config = config_from(config_args)
    results = run_preflight(
        config,
        skip=[group for group in GROUPS if group in groups],
        timeout_seconds=timeout_seconds or None,
    )
    print(format_table(results), flush=True)
    failed = [result for result in results if result.outcome is Outcome.FAILED]
    code = int(bool(failed))
    if failed and all(result.is_outage for result in failed):
        code = os.EX_TEMPFAIL
    if any(result.is_stuck for result in results):
        exit_at_once(code)
    raise typer.Exit(code)
