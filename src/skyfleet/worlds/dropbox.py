"""Dropbox: a tree of folders, files with versions, and the rights to view or edit them."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Literal

from skyfleet.envs.tools import ToolError, check_known, shown
from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds import vocabulary
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft, World, call

dropbox = World(
    "dropbox",
    """
    create table users (name text primary key);
    create table folders (path text primary key);
    create table files (
        id integer primary key, folder text, name text, owner text, size_mb integer,
        version integer
    );
    create table versions (
        file_id integer, version integer, editor text, day text, primary key (file_id, version)
    );
    create table shares (file_id integer, person text, rights text, primary key (file_id, person));
    """,
)

_TOPS = ("Work", "Home", "School")
_SUBS = ("Bills", "Plans", "Photos", "Letters")
_FILES = vocabulary.Names(
    ("tax", "trip", "class", "rent", "pet", "team", "sport", "car"),
    ("form", "letter", "list", "bill", "map", "plan", "photo", "card"),
)

Rights = Literal["view", "edit"]


@dropbox.seeder
def fill(app: App, rng: Random) -> None:
    people = [app.user, *rng.sample([name for name in vocabulary.PEOPLE if name != app.user], 4)]
    for name in people:
        app.db.insert("users", name=name)
    ids = iter(rng.sample(range(1, 25), 24))
    # Few names, so that the same name often occurs in two folders.
    names = rng.sample(_FILES.in_family(app.family), 8)
    for top in rng.sample(_TOPS, 2):
        app.db.insert("folders", path=top)
        for sub in rng.sample(_SUBS, 3):
            folder = f"{top}/{sub}"
            app.db.insert("folders", path=folder)
            sizes = iter(rng.sample(range(2, 60), 4))
            for name in rng.sample(names, rng.randint(2, 4)):
                file = {"id": next(ids), "name": name, "size_mb": next(sizes)}
                _insert_file(app, rng, people, folder=folder, **file)


def _insert_file(app: App, rng: Random, people: list[str], **file: object) -> None:
    owner, *others = rng.sample(people, 4)
    days = vocabulary.DAYS[-rng.randint(2, 4) :]
    file_id = app.db.insert("files", **file, owner=owner, version=len(days))
    for version, day in enumerate(days, start=1):
        edit = {"version": version, "editor": rng.choice([owner, *others]), "day": day}
        app.db.insert("versions", file_id=file_id, **edit)
    for person in others[: rng.randint(1, 3)]:
        rights = rng.choice(["view", "edit"])
        app.db.insert("shares", file_id=file_id, person=person, rights=rights)


@dropbox.reads
def list_folders(app: App, inside: str) -> list[Row]:
    """List inner folders."""
    _check_folder(app, inside)
    return app.db.rows(
        "select path, (select count(*) from files where folder = path) as files from folders"
        " where path like ? || '/%' order by path",
        inside,
    )


@dropbox.reads
def list_files(app: App, folder: str) -> list[Row]:
    """List files of a folder."""
    _check_folder(app, folder)
    sql = "select name, id, owner, size_mb from files where folder = ? order by name"
    return app.db.rows(sql, folder)


@dropbox.reads
def list_versions(app: App, file_id: int) -> list[Row]:
    """List versions, newest first."""
    _file(app, file_id)
    sql = "select version, editor, day from versions where file_id = ? order by version desc"
    return app.db.rows(sql, file_id)


@dropbox.reads
def list_shares(app: App, file_id: int) -> list[Row]:
    """List who has rights."""
    _file(app, file_id)
    sql = "select rights, person from shares where file_id = ? order by person"
    return app.db.rows(sql, file_id)


@dropbox.writes
def restore_version(app: App, file_id: int, version: int) -> None:
    """Restore an old version."""
    current = _file(app, file_id)["version"]
    known = [row["version"] for row in list_versions(app, file_id) if row["version"] != current]
    if version not in known:
        raise ToolError(f"no old version {version}; choose from {', '.join(map(str, known))}")
    app.db.write("update files set version = ? where id = ?", version, file_id)


@dropbox.writes
def move_file(app: App, file_id: int, folder: str, name: str | None = None) -> None:
    """Move or rename a file."""
    name = name or _file(app, file_id)["name"]
    if folder not in app.db.column("select path from folders"):
        raise ToolError(f"no folder {shown(folder)}; create_folder first")
    if name in (taken := [file["name"] for file in list_files(app, folder)]):
        free = next(f"{name} {n}" for n in count(2) if f"{name} {n}" not in taken)
        raise ToolError(f"{folder} has a {shown(name)}; a free name: '{free}'")
    app.db.write("update files set folder = ?, name = ? where id = ?", folder, name, file_id)


@dropbox.writes
def create_folder(app: App, path: str) -> None:
    """Create a folder."""
    parent, _, name = path.rpartition("/")
    _check_folder(app, parent)
    if not name or app.db.row("select * from folders where path = ?", path):
        raise ToolError(f"path is {shown(path)}; give a new folder, as in {parent}/Name")
    app.db.insert("folders", path=path)


@dropbox.writes
def share_file(app: App, file_id: int, person: str, rights: Rights) -> None:
    """Share a file."""
    owner = _file(app, file_id)["owner"]
    others = app.db.column("select name from users where name != ? order by name", owner)
    check_known("person to share with", person, others)
    sql = "insert into shares (file_id, person, rights) values (?, ?, ?)"
    sql += " on conflict do update set rights = excluded.rights"
    app.db.write(sql, file_id, person, rights)


def _check_folder(app: App, path: str) -> None:
    check_known("folder", path, app.db.column("select path from folders order by path"))


def _users(app: App) -> list[str]:
    return app.db.column("select name from users order by name")


def _file(app: App, file_id: int) -> Row:
    file = app.db.row("select * from files where id = ?", file_id)
    if file is None:
        raise ToolError(f"no file {file_id}; list_files shows the ids")
    return file


def _people(app: App, file: Row, rights: Rights) -> list[str]:
    return [row["person"] for row in list_shares(app, file["id"]) if row["rights"] == rights]


def _any_file(app: App, rng: Random) -> tuple[Row, str, RecordedCall]:
    """A file, a description that is unique to it, and the call that finds it."""
    file = rng.choice(app.db.rows("select * from files"))
    return file, f"'{file['name']}' in {file['folder']}", call("list_files", folder=file["folder"])


@dropbox.template(difficulty=1)
def share_by_name(app: App, rng: Random) -> TaskDraft | None:
    (file, it, listed), person = _any_file(app, rng), rng.choice(_users(app))
    rights: Rights = rng.choice(["view", "edit"])
    if person in (file["owner"], *_people(app, file, rights)):
        return None
    prompts = [f"Let {person} {rights} {it}.", f"{person} needs to {rights} {it}. Share it."]
    shared = call("share_file", file_id=file["id"], person=person, rights=rights)
    return TaskDraft(prompts=prompts, calls=[listed, shared])


@dropbox.template(difficulty=1)
def megabytes_of(app: App, rng: Random) -> TaskDraft | None:
    file, _, listed = _any_file(app, rng)
    owner, folder = file["owner"], file["folder"]
    sizes = [row["size_mb"] for row in list_files(app, folder) if row["owner"] == owner]
    if len(sizes) > 2:
        return None
    prompts = [
        f"How many MB do the files of {owner} in {folder} take?",
        f"What is the total size in MB of {owner}'s files in {folder}?",
    ]
    return TaskDraft(prompts=prompts, calls=[listed], answer=str(sum(sizes)), answer_kind="number")


@dropbox.template(difficulty=2)
def restore_last_of(app: App, rng: Random) -> TaskDraft | None:
    file, it, listed = _any_file(app, rng)
    versions = list_versions(app, file["id"])
    editor = rng.choice(versions)["editor"]
    last = next(row["version"] for row in versions if row["editor"] == editor)
    if last == file["version"]:
        return None
    prompts = [
        f"Restore {it} to the last version that {editor} edited.",
        f"Go back to {editor}'s last version of {it}.",
    ]
    seen = call("list_versions", file_id=file["id"])
    restored = call("restore_version", file_id=file["id"], version=last)
    return TaskDraft(prompts=prompts, calls=[listed, seen, restored])


@dropbox.template(difficulty=2)
def share_somewhere(app: App, rng: Random) -> TaskDraft | None:
    (file, _, _), person = _any_file(app, rng), rng.choice(_users(app))
    name, top = file["name"], file["folder"].partition("/")[0]
    paths = [row["path"] for row in list_folders(app, top)]
    holding = [path for path in paths if name in [row["name"] for row in list_files(app, path)]]
    if len(holding) > 1 or person in (file["owner"], *_people(app, file, "view")):
        return None
    prompts = [
        f"Let {person} view '{name}', which is somewhere in {top}.",
        f"Find '{name}' in a folder of {top} and let {person} view it.",
    ]
    calls = [call("list_folders", inside=top)]
    calls += [call("list_files", folder=path) for path in paths[: paths.index(holding[0]) + 1]]
    calls.append(call("share_file", file_id=file["id"], person=person, rights="view"))
    return TaskDraft(prompts=prompts, calls=calls)


@dropbox.template(difficulty=2)
def move_or_rename(app: App, rng: Random) -> TaskDraft | None:
    file, it, listed = _any_file(app, rng)
    folder = _any_file(app, rng)[0]["folder"]
    if folder == file["folder"]:
        return None
    prompts = [
        f"Move {it} to {folder}. If the name is taken, use the free one.",
        f"{it} belongs in {folder}. Move it, under the free name if its own is taken.",
    ]
    moved = call("move_file", file_id=file["id"], folder=folder)
    if file["name"] not in [row["name"] for row in list_files(app, folder)]:
        return TaskDraft(prompts=prompts, calls=[listed, moved])
    named = call("move_file", **moved.arguments, name=f"{file['name']} 2")
    return TaskDraft(prompts=prompts, calls=[listed, moved, named], expected_errors=1)


@dropbox.template(difficulty=2)
def move_to_new_folder(app: App, rng: Random) -> TaskDraft | None:
    (file, it, listed), sub = _any_file(app, rng), rng.choice(_SUBS)
    folder = f"{file['folder'].partition('/')[0]}/{sub}"
    if app.db.row("select * from folders where path = ?", folder):
        return None
    prompts = [f"Move {it} to {folder}.", f"Move {it} to {folder}, which may not exist yet."]
    moved = call("move_file", file_id=file["id"], folder=folder)
    calls = [listed, moved, call("create_folder", path=folder), moved]
    return TaskDraft(prompts=prompts, calls=calls, expected_errors=1)


@dropbox.template(difficulty=3)
def only_view(app: App, rng: Random) -> TaskDraft | None:
    file, it, listed = _any_file(app, rng)
    editors = _people(app, file, "edit")
    if not editors:
        return None
    prompts = [
        f"Everyone who may edit {it} shall only view it.",
        f"No more edits by others: let the editors of {it} only view it.",
    ]
    calls = [listed, call("list_shares", file_id=file["id"])]
    calls += [
        call("share_file", file_id=file["id"], person=person, rights="view") for person in editors
    ]
    return TaskDraft(prompts=prompts, calls=calls)


@dropbox.template(difficulty=2, held_out=True)
def shared_with(app: App, rng: Random) -> TaskDraft | None:
    file, it, listed = _any_file(app, rng)
    rights: Rights = rng.choice(["view", "edit"])
    people = _people(app, file, rights)
    if len(people) != 1:
        return None
    prompts = [
        f"With whom is {it} shared to {rights}?",
        f"Besides the owner, who has the right to {rights} {it}?",
    ]
    calls = [listed, call("list_shares", file_id=file["id"])]
    return TaskDraft(prompts=prompts, calls=calls, answer=people[0], answer_kind="name")


@dropbox.template(difficulty=3, held_out=True)
def restore_for_editor(app: App, rng: Random) -> TaskDraft | None:
    file, it, listed = _any_file(app, rng)
    old = rng.choice(list_versions(app, file["id"])[1:])
    if old["editor"] in (file["owner"], *_people(app, file, "edit")):
        return None
    prompts = [
        f"Restore {it} to its {old['day']} version and let the editor of that version edit it.",
        f"Go back to the {old['day']} version of {it}. Whoever made it may edit the file.",
    ]
    calls = [
        listed,
        call("list_versions", file_id=file["id"]),
        call("restore_version", file_id=file["id"], version=old["version"]),
        call("share_file", file_id=file["id"], person=old["editor"], rights="edit"),
    ]
    return TaskDraft(prompts=prompts, calls=calls)
