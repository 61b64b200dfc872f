"""Packages, files and links in the documentation exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from skyfleet.worlds.catalog import WORLD_NAMES, get_world

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "skyfleet"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

_LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_architecture_page_lists_every_package_in_its_layer() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    listed = {name: int(layer) for layer, names in rows for name in re.findall(r"`(\w+)`", names)}
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = contract["tool"]["importlinter"]["contracts"][0]["layers"]
    names = [set(re.findall(r"\w+", layer)) for layer in reversed(layers)]
    assert listed == {name: layer for layer, group in enumerate(names) for name in group}


def test_files_named_on_the_architecture_page_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page))
    assert [name for name in sorted(named) if not (SOURCE / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in _LINK.findall(page.read_text())]
    relative = [link for link in links if link and not re.match(r"[a-z]+:", link)]
    assert [link for link in relative if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_the_worlds_page_names_every_tool_and_every_template_with_its_difficulty(name: str) -> None:
    world = get_world(name)
    page = (ROOT / "docs" / "worlds.md").read_text()
    tools, templates = page.partition("## Templates")[::2]
    (row,) = [line for line in tools.splitlines() if line.startswith(f"| `{name}` |")]
    assert set(re.findall(r"`(\w+)`", row)) - {name} == {spec.name for spec in world.toolkit.specs}
    rows = _rows_of(name, templates)
    for template in world.templates:
        (row,) = [line for line in rows if f"`{template.name}`" in line]
        _, difficulty, note = row.removesuffix("|").rsplit("|", 2)
        assert (int(difficulty), "held out" in note) == (template.difficulty, template.held_out)


def _rows_of(world: str, table: str) -> list[str]:
    """A world's own rows: the one with its name, and those below it without any."""
    rows: list[str] = []
    mine = False
    for line in table.splitlines():
        if line.startswith("| `"):
            mine = line.startswith(f"| `{world}` |")
        if mine and line.startswith("| "):
            rows.append(line)
    return rows
