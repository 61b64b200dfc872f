"""`skyfleet serve`: serve a policy over an OpenAI-compatible API."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Annotated

import typer

from skyfleet.api.serving import KEY_VARIABLE
from skyfleet.cli.agents import CheckpointPath, describe_agent, select_policy
from skyfleet.cli.arguments import ConfigArgs, DryRun, config_from, show_plan
from skyfleet.errors import ConfigError


def serve_command(
    config_args: ConfigArgs = None,
    checkpoint: CheckpointPath = None,
    name: Annotated[
        str | None, typer.Option(help="Model name for clients; by default trainer.run_name.")
    ] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 listens on all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    dry_run: DryRun = False,
) -> None:
    """Serve a checkpoint or a model over an OpenAI-compatible API."""
    config = config_from(config_args)
    model = name or config.trainer.run_name
    url = f"http://{host}:{port}/v1"
    if dry_run:
        show_plan(config, [f"would serve {model} at {url}"])
        return
    if config.generator.is_remote:
        raise ConfigError(
            f"generator.backend={config.generator.backend!r} is a server already; "
            "serve with generator.backend=embedded or vllm"
        )
    keyed = os.environ.get(KEY_VARIABLE)
    access = f"clients need the key in {KEY_VARIABLE}" if keyed else "no key is needed"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), select_policy(config, checkpoint) as policy:
        server = policy.serve(host=host, port=port, name=model)
        served = f"serving {describe_agent(policy)} as {model} at {url}"
        print(f"{served}; {access}; Ctrl-C stops it", flush=True)
        server.wait()
