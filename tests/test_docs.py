"""What the documents say of folders and links is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyfleet.worlds.catalog import WORLD_NAMES, get_world

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "skyfleet"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

_BRANCH = re.compile(r"^((?:│   |    )*)(?:├── |└── )(\S+)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_architecture_page_draws_every_file_and_no_other() -> None:
    files = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if path.name != "__init__.py"
    }
    drawn = _drawn(ROOT / "docs" / "architecture.md")
    assert {path for path in drawn if not path.endswith("/")} == files
    assert {path for path in drawn if path.endswith("/")} == {
        f"{parent.as_posix()}/" for file in files for parent in list(Path(file).parents)[:-1]
    }


def test_the_readme_draws_every_room_and_no_other() -> None:
    rooms = {f"{room.parent.name}/" for room in SOURCE.glob("*/__init__.py")}
    assert _drawn(ROOT / "README.md") == rooms | {"errors.py"}


def test_every_line_of_a_tree_says_what_it_is() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "architecture.md"):
        branches = [line for line in _tree(page) if _BRANCH.match(line)]
        assert [line for line in branches if not re.search(r"\S {2,}\S", line)] == []


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


def _tree(page: Path) -> list[str]:
    """The lines of the block that begins with `src/skyfleet/`."""
    _, _, after = page.read_text().partition("```\nsrc/skyfleet/\n")
    return after.partition("```")[0].splitlines()


def _drawn(page: Path) -> set[str]:
    """Paths below src/skyfleet; a folder ends in a slash."""
    paths: set[str] = set()
    above: list[str] = []
    for line in _tree(page):
        if branch := _BRANCH.match(line):
            depth = len(branch[1]) // 4
            above[depth:] = [branch[2]]
            paths.add("".join(above))
    return paths
