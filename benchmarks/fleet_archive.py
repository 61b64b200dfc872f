"""A world with long pages, behind the Fleet-compatible server (for benchmarks/gpu_fleet_recipe.py).

    FLEET_API_KEY=key python -m benchmarks.fleet_archive --port 8123

Tasks with `data_key=seed-0` have long pages and others short ones, so that their episodes differ in
length. The verifier reads which pages were opened.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import sleep
from unittest.mock import patch

from skyfleet.envs.tools import ToolError
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import add_world
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import World

KEY = "local-key"
LONG_VARIABLE, SHORT_VARIABLE = "ARCHIVE_LONG_WORDS", "ARCHIVE_SHORT_WORDS"
PAGES = range(10, 42)

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
WORDS = tuple(
    dict.fromkeys("".join(Random(number).choices(_SYLLABLES, k=3)) for number in range(400))
)

VERIFIER = """
def validate_task(env):
    rows = env.db("current").table("reads").all()
    even = [row for row in rows if row["page"] % 2 == 0]
    return len(even) / max(len(rows), 1)
"""
"""The share of even pages: attempts at one task differ in it, so they have advantages."""

archive = World(
    "archive",
    "create table settings (id integer primary key, salt integer, words integer);"
    "create table reads (id integer primary key, page integer);",
)


@archive.seeder
def fill(app: App, rng: Random) -> None:
    variable = SHORT_VARIABLE if app.family else LONG_VARIABLE
    app.db.insert("settings", salt=rng.randrange(10**6), words=int(os.environ.get(variable, "120")))


@archive.writes
def read_page(app: App, page: int) -> str:
    """Read one page of the archive, and note that it was read."""
    if page not in PAGES:
        raise ToolError(f"no page {page}; pages are {PAGES.start} to {PAGES.stop - 1}")
    app.db.insert("reads", page=page)
    settings = app.db.row("select * from settings")
    assert settings is not None
    return write_page(settings["salt"], page, settings["words"])


def write_page(salt: int, page: int, n_words: int) -> str:
    return " ".join(Random(f"{salt}/{page}").choices(WORDS, k=n_words))


@contextmanager
def serve_archive(log: Path, *, long_words: int, short_words: int) -> Iterator[None]:
    """The Fleet-compatible server in a process of its own; this process's environment names it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = {LONG_VARIABLE: str(long_words), SHORT_VARIABLE: str(short_words)}
    os.environ |= {"FLEET_API_KEY": KEY, "FLEET_BASE_URL": f"http://127.0.0.1:{port}"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fleet_archive", "--port", str(port)],
            env={**os.environ, **words},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_for(port, process, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            sys.exit(f"the server ended: {log.read_text()[-2000:]}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            sleep(0.2)
    sys.exit(f"the server does not listen on port {port} after 120 s: {log.read_text()[-2000:]}")


def make_tasks(n_tasks: int) -> list[Task]:
    """The first of them has long pages."""
    return [
        Task(
            key=f"archive-{number}",
            env_key="archive",
            prompt="Read pages of the archive until you have seen enough of them.",
            data_key=f"seed-{4 * number + min(number, 1)}",
            verifier_code=VERIFIER,
        )
        for number in range(n_tasks)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    port: int = parser.parse_args().port

    from skyfleet.envs.agent_gateway import LOCAL_ACCESS
    from skyfleet.envs.verifiers.confinement import probe_confinement
    from skyfleet.envs.verifiers.grading import shared_jail
    from skyfleet.serving.listening import build_server
    from skyfleet.worlds.fleet_server import verification
    from skyfleet.worlds.fleet_server.server import build_fleet_app

    add_world("benchmarks.fleet_archive:archive", key="archive")
    app = build_fleet_app([], api_key=os.environ["FLEET_API_KEY"])
    is_missing = probe_confinement().is_missing
    if is_missing:
        print("this machine confines no verifier; the benchmark's own runs without", flush=True)
    jail = shared_jail(allow_unconfined=is_missing)
    with patch.object(verification, "shared_jail", lambda: jail):
        build_server(app, LOCAL_ACCESS, host="127.0.0.1", port=port, log_level="warning").run()


if __name__ == "__main__":
    main()
