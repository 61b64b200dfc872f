"""Presets: complete run configurations that ship with the package, by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    name: str
    description: str
    """The first sentence of the file's opening comment."""
    text: str
    """The YAML."""


@cache
def list_presets() -> tuple[Preset, ...]:
    """Every preset, in order of its name."""
    found = [path for path in files(__name__).iterdir() if path.name.endswith(".yaml")]
    return tuple(
        Preset(name=path.name.removesuffix(".yaml"), description=_describe(text), text=text)
        for path in sorted(found, key=lambda path: path.name)
        for text in [path.read_text(encoding="utf-8")]
    )


def find_preset(name: str) -> Preset | None:
    return next((preset for preset in list_presets() if preset.name == name), None)


def _describe(text: str) -> str:
    comment: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(comment).split(". ")[0].removesuffix(".") + "."
