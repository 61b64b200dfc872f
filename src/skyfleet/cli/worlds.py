"""`skyfleet worlds`: what ships, a world of your own, and worlds served to other agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyfleet.cli.arguments import DryRun

worlds_app = typer.Typer(
    name="worlds", help="See, make and serve embedded worlds.", no_args_is_help=True
)


@worlds_app.command("list")
def list_command(dry_run: DryRun = False) -> None:
    """Every world that ships, with its tools and templates."""
    from skyfleet.envs.worlds.catalog import WORLDS

    if dry_run:
        print(f"would list {len(WORLDS)} worlds")
        return
    for world in WORLDS:
        held_out = sum(template.held_out for template in world.templates)
        tools = ", ".join(spec.name for spec in world.toolkit.specs)
        n_templates = len(world.templates)
        print(f"{world.name}: {n_templates} templates, {held_out} never trained on; {tools}")


@worlds_app.command("new")
def new_command(
    name: Annotated[str, typer.Argument(help="A Python name in small letters, such as shop.")],
    folder: Annotated[Path, typer.Option(help="Where the two files go.")] = Path(),
    dry_run: DryRun = False,
) -> None:
    """Write a small world that works, and its test."""
    from skyfleet.envs.worlds.skeleton import write_world

    if dry_run:
        print(f"would write {folder / name}.py and {folder / f'test_{name}'}.py")
        return
    for path in write_world(name, folder):
        print(f"wrote {path}")
    print(f"try: skyfleet tasks list 'world:{name}:{name}?count=5'")
