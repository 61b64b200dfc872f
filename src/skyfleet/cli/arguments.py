"""What commands share: where a configuration comes from, and extras that may be missing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.errors import MissingExtraError

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig

ConfigArgs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE] [key=value]...", help="A YAML file, and keys to change."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and stop.")]


def config_from(words: list[str] | None) -> RunConfig:
    """The first word may be a file; the rest are overrides."""
    from skyfleet.config.loading import load_config, load_config_file

    words = words or []
    if words and "=" not in words[0]:
        return load_config_file(words[0], words[1:])
    return load_config("", words)


def show_plan(config: RunConfig, sentences: Iterable[str]) -> None:
    """A dry run: the resolved configuration, what would happen, and what would be warned of."""
    from skyfleet.config.explain import as_yaml
    from skyfleet.config.turn_rules import lone_native_flag

    print(as_yaml(config), end="")
    told = (*sentences, *lone_native_flag(config))
    # At once: what is refused after it goes to stderr.
    print("\n".join(f"# {sentence}" for sentence in told), flush=True)


@contextmanager
def torch_needed() -> Iterator[None]:
    """Names the extra where torch or transformers is missing."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "train")
    # Idle OpenMP threads otherwise spin: on a busy machine two run many times slower than one.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    yield
