"""`skyfleet worlds new` writes a working world, and user worlds are used like built-in ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from skyfleet.cli.main import app
from skyfleet.errors import ConfigError
from skyfleet.worlds.catalog import add_world, get_world
from skyfleet.worlds.skeleton import write_world


def test_a_new_world_passes_its_own_generated_test(tmp_path: Path) -> None:
    written = write_world("shop", tmp_path)
    assert [path.name for path in written] == ["shop.py", "test_shop.py"]
    assert len(written[0].read_text().splitlines()) <= 55
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout


def test_the_command_prints_how_to_view_the_new_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    app(["worlds", "new", "kiosk"], standalone_mode=False)
    assert "skyfleet tasks list 'world:kiosk:kiosk?count=5'" in capsys.readouterr().out
    app(["tasks", "list", "world:kiosk:kiosk?count=5"], standalone_mode=False)
    assert capsys.readouterr().out.count("kiosk-restock-") == 5
    assert get_world("kiosk").name == "kiosk"


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"test_shop\.py already exists"):
        write_world("shop", tmp_path)
    assert not (tmp_path / "shop.py").exists()


@pytest.mark.parametrize("name", ["Shop", "my-shop", "1shop", ""])
def test_an_invalid_identifier_is_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a lowercase Python identifier"):
        write_world(name, tmp_path)


@pytest.mark.parametrize("name", ["class", "github", "count", "set_stock", "list", "random"])
def test_a_name_in_use_is_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"NAME='{name}' is .*; choose another .* my_{name}$"):
        write_world(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_names_that_the_generated_file_defines_are_rejected(tmp_path: Path) -> None:
    (path, _) = write_world("shop", tmp_path)
    bound = {
        name
        for node in ast.parse(path.read_text()).body
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else [node.name]
            if isinstance(node, ast.FunctionDef)
            else []
        )
    }
    assert {"call", "count", "restock"} <= bound
    for name in bound:
        with pytest.raises(ConfigError):
            write_world(name, tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def f(:\n", r"cannot be imported: SyntaxError: invalid syntax"),
        ("1 / 0\n", r"cannot be imported: ZeroDivisionError: division by zero; correct it"),
        ("raise RuntimeError('two\\nlines')\n", r"cannot be imported: RuntimeError: two lines;"),
    ],
)
def test_an_import_error_of_the_users_module_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_module.py").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        add_world("broken_module:world", key="world")


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("json", "names no object; write module:name"),
        ("no_such_module_here:world", "cannot be imported"),
        ("json:dumps", "name a World"),
    ],
)
def test_an_object_that_is_not_a_world_is_rejected(target: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        add_world(target, key="world")
