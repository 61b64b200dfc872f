from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyfleet.storage.local import atomic_folder, discard, sweep, write_atomically


@contextmanager
def disk_full_after(n_bytes: int) -> Iterator[None]:
    """Limit the file size to `n_bytes`: writes beyond it fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_and_bytes_replace_the_old_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "é")
    assert (tmp_path / "a").read_bytes() == b"\xc3\xa9"
    write_atomically(tmp_path / "a", b"\x00")
    assert (tmp_path / "a").read_bytes() == b"\x00"
    assert names(tmp_path) == ["a"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "old")
    with disk_full_after(10), pytest.raises(OSError, match="too large"):
        write_atomically(tmp_path / "a", "n" * 11)
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_folder_appears_only_when_the_block_ends(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    with atomic_folder(folder) as draft:
        (draft / "inside").mkdir()
        (draft / "inside" / "a").write_text("new")
        assert not folder.exists()
    assert (folder / "inside" / "a").read_text() == "new"
    assert names(folder.parent) == ["folder"]


def test_a_published_folder_replaces_the_old_one_completely(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with atomic_folder(folder) as draft:
        (draft / "old").touch()
    with atomic_folder(folder) as draft:
        (draft / "new").touch()
    assert names(folder) == ["new"]
    assert names(tmp_path) == ["folder"]


def test_a_folder_replaces_a_file_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "published"
    folder.write_text("somebody wrote this")
    with atomic_folder(folder) as draft:
        (draft / "a").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["published"]
    assert (folder / "a").read_text() == "new"
    (tmp_path / ".published.replaced").write_text("killed before it was removed")
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_a_full_disk_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with atomic_folder(folder) as draft:
        (draft / "a").write_text("old")
    with (
        disk_full_after(10),
        pytest.raises(OSError, match="too large"),
        atomic_folder(folder) as draft,
    ):
        (draft / "a").write_text("n" * 11)
    assert (folder / "a").read_text() == "old"
    assert names(tmp_path) == ["folder"]


def test_an_interrupt_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with atomic_folder(folder) as draft:
        (draft / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_folder(folder):
        raise KeyboardInterrupt
    assert (folder / "a").read_text() == "old"
    assert names(tmp_path) == ["folder"]


def test_leftovers_of_a_killed_writer_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".folder.draft" / "half").mkdir(parents=True)
    with atomic_folder(tmp_path / "folder") as draft:
        assert names(draft) == []
    assert names(tmp_path) == ["folder"]


def test_sweep_restores_a_folder_whose_replacement_was_interrupted(tmp_path: Path) -> None:
    (tmp_path / ".a.replaced" / "old").mkdir(parents=True)
    (tmp_path / ".a.draft" / "new").mkdir(parents=True)
    (tmp_path / ".b.replaced" / "old").mkdir(parents=True)
    (tmp_path / "b" / "new").mkdir(parents=True)
    (tmp_path / ".c.draft").mkdir()
    sweep(tmp_path)
    assert names(tmp_path) == ["a", "b"]
    assert names(tmp_path / "a") == ["old"]
    assert names(tmp_path / "b") == ["new"]


def test_a_discarded_folder_is_removed(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    discard(tmp_path / "folder")
    assert names(tmp_path) == []


def test_publishing_to_a_symlink_replaces_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "real")
    for name in ("old", "new"):
        with atomic_folder(link) as draft:
            (draft / name).touch()
    assert link.is_symlink()
    assert names(tmp_path / "real") == ["new"]
    discard(link)
    assert not link.exists()
    assert names(tmp_path) == ["elsewhere"]
    assert names(link.parent) == ["link"]
