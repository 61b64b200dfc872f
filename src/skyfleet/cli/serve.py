"""`skyfleet serve`: serve a policy over an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.agents import CheckpointPath, describe_weights, open_run_policy_client
from skyfleet.cli.arguments import ConfigArgs, DryRun, config_from, show_plan
from skyfleet.cli.worlds import check_free
from skyfleet.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from skyfleet.config.root import RunConfig

KEY_VARIABLE = "SKYFLEET_API_KEY"


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
    try:
        import uvicorn
    except ImportError:
        raise MissingExtraError("uvicorn", "serve") from None
    if config.generator.is_remote:
        raise ConfigError(
            f"generator.backend={config.generator.backend!r} is a server already; "
            "serve with generator.backend=embedded or vllm"
        )
    check_free(host, port)
    api_key = os.environ.get(KEY_VARIABLE) or None
    keyed = f"clients need the key in {KEY_VARIABLE}" if api_key else "no key is needed"

    async def serve() -> None:
        async with _app(config, checkpoint, model, api_key) as (app, weights):
            print(f"serving {weights} as {model} at {url}; {keyed}; Ctrl-C stops it", flush=True)
            settings = uvicorn.Config(app, host=host, port=port, log_level="warning")
            await uvicorn.Server(settings).serve()

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
