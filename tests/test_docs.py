"""Packages, files, links and Python names in the documentation exist."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyfleet as sf
from skyfleet.worlds.catalog import WORLD_NAMES, get_world

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "skyfleet"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_INLINE_CODE = re.compile(r"`([^`\n]+)`")
_DOTTED_NAME = re.compile(r"(?<![\w./:-])[A-Za-z_]\w*(?:\.\w+)+")
_IMPORT = re.compile(r"from (skyfleet[\w.]*) import (\([^)]*\)|[^\n(]*)")
_FILE_ENDINGS = (".json", ".jsonl", ".yaml", ".toml", ".txt", ".html", ".py")
_EXAMPLE_FILES = {"button.py", "shop.py", "test_shop.py"}
"""Files that a page asks the reader to write."""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_files_named_in_the_documentation_exist(page: Path) -> None:
    existing = [path.as_posix() for path in ROOT.glob("[!.]*/**/*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8"))) - _EXAMPLE_FILES
    assert [name for name in named if not any(p.endswith(f"/{name}") for p in existing)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_names_in_the_documentation_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "CHANGELOG.md":  # names what was removed
        text = ""
    assert [name for name in find_python_names(text) if not is_defined(name)] == []


@pytest.mark.parametrize(
    ("name", "defined"),
    [
        ("skyfleet.analysis.learning_signal.compute_signals", True),
        ("analysis.signal.env_signals", False),
        ("envs.agent_env.program", False),
        ("Transcript.append_prompt", True),
        ("Transcript.give", False),
        ("sf.train", True),
        ("sf.learn", False),
    ],
)
def test_a_python_name_is_looked_up_in_the_source(name: str, defined: bool) -> None:
    assert is_defined(name) == defined


def test_config_keys_and_file_names_are_not_python_names() -> None:
    text = "`trainer.seed=1`, `metrics.jsonl`, `arguments.times`, `algorithms.kl`, `Task.key`"
    assert list(find_python_names(text)) == ["algorithms.kl", "Task.key"]


def test_imports_in_code_blocks_are_python_names() -> None:
    text = "```python\nfrom skyfleet.chat.message import Message, Text as T\n```"
    expected = ["skyfleet.chat.message.Message", "skyfleet.chat.message.Text"]
    assert list(find_python_names(text)) == expected


def find_python_names(text: str) -> Iterator[str]:
    """Dotted names of ours: of a module, of a class, of `sf`, or in an import statement."""
    for code in _INLINE_CODE.findall(text):
        for name in _DOTTED_NAME.findall(code):
            head = name.partition(".")[0]
            ours = head in {"skyfleet", "sf"} or head in PACKAGES or head in CLASSES
            if ours and not name.endswith(_FILE_ENDINGS):
                yield name
    for module, names in _IMPORT.findall(text):
        for name in names.strip("()").split(","):
            if name.strip():
                yield f"{module}.{name.split()[0]}"


def is_defined(name: str) -> bool:
    """Looks names up in the syntax tree, because some modules need torch or a GPU to be imported."""
    head, *rest = name.split(".")
    if head in CLASSES:
        return rest[0] in CLASSES[head]
    if head == "sf":
        return rest[0] in sf.__all__
    path, parts = SOURCE, rest if head == "skyfleet" else [head, *rest]
    for index, part in enumerate(parts):
        if (path / part).is_dir():
            path /= part
            continue
        if (module := path / f"{part}.py").exists():
            following = parts[index + 1 :]
            return not following or following[0] in find_definitions(ast.parse(module.read_text()))
        return part in find_definitions(ast.parse((path / "__init__.py").read_text()))
    return True


def find_definitions(node: ast.Module | ast.ClassDef) -> set[str]:
    """Names that a module or a class body defines or imports; of a class also `self.name = ...`."""
    found: set[str] = set()
    for child in ast.walk(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(child.name)
            case ast.alias():
                found.add(child.asname or child.name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def index_classes() -> dict[str, set[str]]:
    """Class -> its attributes and those of its bases; classes of one name are merged."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own.setdefault(node.name, set()).update(find_definitions(node))
                named = {base.id for base in node.bases if isinstance(base, ast.Name)}
                bases.setdefault(node.name, set()).update(named - {node.name})

    def collect(name: str) -> set[str]:
        return own.get(name, set()).union(*(collect(base) for base in bases.get(name, ())))

    return {name: collect(name) for name in own}


CLASSES = index_classes()
PACKAGES = {path.parent.name for path in SOURCE.glob("*/__init__.py")} - {"trainer", "sentinels"}
"""Without the packages whose names are sections of the configuration."""


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
