"""`skyfleet worlds`: list, create and serve built-in environments (worlds)."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skyfleet.cli.arguments import AllowHost, DryRun
from skyfleet.errors import ConfigError
from skyfleet.serving.access import (
    TOKEN_VARIABLE,
    build_access_policy,
    check_bind,
    choose_family,
    format_url,
    read_token,
    strip_brackets,
)
from skyfleet.terminal import print

if TYPE_CHECKING:
    from skyfleet.tasks.task import Task

FLEET_VARIABLE = "FLEET_API_KEY"

worlds_app = typer.Typer(
    name="worlds",
    help="List, create and serve built-in environments (worlds).",
    no_args_is_help=True,
)


@worlds_app.command("list")
def list_command() -> None:
    """List the built-in worlds with their tools and templates."""
    from skyfleet.worlds.catalog import CONVERSATIONS, WORLDS

    for world in (*WORLDS, *CONVERSATIONS):
        held_out = sum(template.held_out for template in world.templates)
        tools = ", ".join(spec.name for spec in world.toolkit.specs)
        n_templates = len(world.templates)
        print(f"{world.name}: {n_templates} templates, {held_out} never trained on; {tools}")


@worlds_app.command("new")
def new_command(
    name: Annotated[str, typer.Argument(help="A lower-case Python name, such as shop.")],
    folder: Annotated[Path, typer.Option(help="Folder for the two files.")] = Path(),
    dry_run: DryRun = False,
) -> None:
    """Write a small working world and its test."""
    from skyfleet.worlds.skeleton import world_paths, write_world

    if dry_run:
        print(f"would write {' and '.join(map(str, world_paths(name, folder)))}")
        return
    for path in write_world(name, folder):
        print(f"wrote {path}")
    print(f"try: skyfleet tasks list 'world:{name}:{name}?count=5'")


@worlds_app.command("serve")
def serve_command(
    sources: Annotated[
        list[str], typer.Argument(help="Task files, or world:github?split=train&count=20.")
    ],
    protocol: Annotated[Literal["openenv", "mcp", "fleet"], typer.Option()] = "openenv",
    host: Annotated[
        str,
        typer.Option(
            help="0.0.0.0 listens on all interfaces, and needs SKYFLEET_API_KEY, or FLEET_API_KEY "
            "with fleet."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    max_sessions: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 1024,
    ttl_seconds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Time after which an episode is closed: idle time with openenv and mcp, age with "
            "fleet, unless its client sets another.",
        ),
    ] = 900,
    allow_host: AllowHost = None,
    dry_run: DryRun = False,
) -> None:
    """Serve worlds over OpenEnv, MCP or Fleet's API."""
    from skyfleet.config.root import RunConfig
    from skyfleet.envs.verifiers.confinement import check_verifiers
    from skyfleet.trainer.tasks import load_sources
    from skyfleet.worlds.catalog import CONVERSATION_NAMES, get_world

    variable = FLEET_VARIABLE if protocol == "fleet" else TOKEN_VARIABLE
    key = read_token(variable)
    check_bind(host, key, variable=variable)
    # Fleet's server checks its key itself.
    token = None if protocol == "fleet" else key
    access = build_access_policy(host, token=token, allowed_hosts=allow_host or ())
    host, url = strip_brackets(host), format_url(host, port)
    tasks = load_sources(sources, key="SOURCE")
    for task in tasks:
        get_world(task.env_key)  # fails before a client gets a task that cannot be opened
        if task.env_key in CONVERSATION_NAMES:
            raise ConfigError(
                f"SOURCE has tasks of {task.env_key}, whose simulated user talks to agents of this "
                "process only; leave it out, or play it with skyfleet rollout or evaluate"
            )
    check_verifiers(RunConfig(), tasks)
    if dry_run:
        print(f"would serve {len(tasks)} tasks at {url} by {protocol}")
        return
    app = _app(protocol, tasks, max_sessions=max_sessions, ttl_seconds=ttl_seconds)
    from skyfleet.serving.listening import build_server

    check_free(host, port)
    what = f"serving {len(tasks)} tasks at {url} by {protocol}; Ctrl-C stops it"
    print(what, flush=True)
    with suppress(KeyboardInterrupt):
        build_server(app, access, host=host, port=port, log_level="warning").run()


def check_free(host: str, port: int) -> None:
    with socket.socket(choose_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port}: {error.strerror}; choose another"
            ) from None


def _app(protocol: str, tasks: list[Task], *, max_sessions: int, ttl_seconds: int) -> Any:
    from skyfleet.worlds.catalog import open_world

    if protocol == "openenv":
        from skyfleet.envs.openenv.server import openenv_app

        return openenv_app(
            tasks, open_world, max_sessions=max_sessions, idle_timeout_seconds=ttl_seconds
        )
    if protocol == "mcp":
        from skyfleet.envs.mcp.server import mcp_app

        return mcp_app(
            tasks, open_world, max_sessions=max_sessions, idle_timeout_seconds=ttl_seconds
        )
    from skyfleet.worlds.fleet_server.server import build_fleet_app

    api_key = os.environ.get(FLEET_VARIABLE)
    if api_key is None:
        api_key = secrets.token_urlsafe(16)
        print(f"{FLEET_VARIABLE} is not set; clients need {FLEET_VARIABLE}={api_key}")
    return build_fleet_app(
        tasks, api_key=api_key, ttl_seconds=ttl_seconds, max_instances=max_sessions
    )
