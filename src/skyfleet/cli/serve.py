"""`skyfleet serve`: serve a policy over an OpenAI-compatible API."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Annotated

import typer

from skyfleet.cli.agents import CheckpointPath, describe_agent, plan_memory, select_policy
from skyfleet.cli.arguments import AllowHost, ConfigArgs, DryRun, config_from, show_plan
from skyfleet.errors import ConfigError
from skyfleet.serving.access import (
    TOKEN_VARIABLE,
    build_access_policy,
    check_bind,
    format_url,
    read_token,
)
from skyfleet.terminal import print


def serve_command(
    config_args: ConfigArgs = None,
    checkpoint: CheckpointPath = None,
    name: Annotated[
        str | None, typer.Option(help="Model name for clients; by default trainer.run_name.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="0.0.0.0 listens on all interfaces, and needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    allow_host: AllowHost = None,
    dry_run: DryRun = False,
) -> None:
    """Serve a checkpoint or a model over an OpenAI-compatible API."""
    config = config_from(config_args)
    model = name or config.trainer.run_name
    url = f"{format_url(host, port)}/v1"
    api_key = read_token()
    check_bind(host, api_key)
    build_access_policy(host, token=api_key, allowed_hosts=allow_host or ())  # checks the names
    if config.generator.is_remote:
        raise ConfigError(
            f"generator.backend={config.generator.backend!r} is a server already; "
            "serve with generator.backend=embedded or vllm"
        )
    selected = select_policy(config, checkpoint)
    if dry_run:
        show_plan(config, [f"would serve {model} at {url}", *plan_memory(selected)])
        return
    access = f"clients need the key in {TOKEN_VARIABLE}" if api_key else "no key is needed"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), selected as policy:
        server = policy.serve(host=host, port=port, name=model, allowed_hosts=allow_host or ())
        served = f"serving {describe_agent(policy)} as {model} at {url}"
        print(f"{served}; {access}; Ctrl-C stops it", flush=True)
        server.wait()
