"""`skyfleet serve`: serve a policy over an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.agents import CheckpointPath, describe_weights, open_run_policy_client
from skyfleet.cli.arguments import AllowHost, ConfigArgs, DryRun, config_from, show_plan
from skyfleet.cli.worlds import check_free
from skyfleet.errors import ConfigError
from skyfleet.serving.access import TOKEN_VARIABLE, build_access_policy, check_bind, read_token
from skyfleet.terminal import print

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from skyfleet.config.root import RunConfig


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
    url = f"http://{host}:{port}/v1"
    api_key = read_token()
    check_bind(host, api_key)
    if dry_run:
        show_plan(config, [f"would serve {model} at {url}"])
        return
    from skyfleet.serving.listening import build_server

    if config.generator.is_remote:
        raise ConfigError(
            f"generator.backend={config.generator.backend!r} is a server already; "
            "serve with generator.backend=embedded or vllm"
        )
    check_free(host, port)
    keyed = f"clients need the key in {TOKEN_VARIABLE}" if api_key else "no key is needed"

    async def serve() -> None:
        async with _app(config, checkpoint, model, api_key) as (app, weights):
            print(f"serving {weights} as {model} at {url}; {keyed}; Ctrl-C stops it", flush=True)
            access = build_access_policy(host, token=None, allowed_hosts=allow_host or ())
            await build_server(app, access, host=host, port=port, log_level="warning").serve()

    with suppress(KeyboardInterrupt):
        asyncio.run(serve())


@asynccontextmanager
async def _app(
    config: RunConfig, checkpoint: Path | None, model: str, api_key: str | None
) -> AsyncIterator[tuple[Starlette, str]]:
    """The application and a description of its weights."""
    from skyfleet.chat.tokenizer import encode
    from skyfleet.serving.server import serve_app

    async with open_run_policy_client(config, checkpoint) as (policy_client, folder):
        app = serve_app(
            policy_client.engine,
            policy_client.renderer,
            encode=partial(encode, policy_client.tokenizer),
            model=model,
            max_model_len=config.max_episode_tokens,
            api_key=api_key,
            max_sessions=config.generator.max_num_seqs,
            template_kwargs=config.generator.chat_template_kwargs,
        )
        yield app, describe_weights(config, folder)
