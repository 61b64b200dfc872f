"""Latency of the viewer with 100,000 synthetic episodes in Chromium.

A step's file is made once and copied for every step, so the making takes seconds; the viewer reads
each copy as its own. Every figure is from the act to what it shows on the screen.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from platform import machine, python_version, system
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from playwright.sync_api import sync_playwright

from skyfleet.analysis.run_folder import open_run
from skyfleet.analysis.viewer.api import Viewer
from skyfleet.analysis.viewer.server import ViewerServer, open_viewer
from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.transcript import Transcript
from skyfleet.config.keys import dump_yaml
from skyfleet.config.loading import load_config
from skyfleet.tasks.task import Grade
from skyfleet.trajectories.archive import EpisodeWriter, train_path
from skyfleet.trajectories.entry import index_path
from skyfleet.trajectories.trajectory import Ending, Trajectory, Turn

STEPS, PER_STEP, TURNS, TOKENS = 250, 400, 6, 600
ENVS = ("github", "booking", "reddit", "outlook", "notion")


def made_up(number: int, random: Random) -> Trajectory:
    """Six turns and 600 tokens, about 9 kB of text; every four-hundredth mentions a zeppelin."""
    words = ["issue", "label", "closed", "assignee", "billing", "upload", "freeze", "login"]

    def turn() -> Turn:
        call = ToolCall(id="0", name="update_issue", arguments={"number": random.randrange(999)})
        answer = " ".join(random.choices(words, k=60))
        return Turn(
            action=Message(role="assistant", tool_calls=(call,), reasoning=answer[:200]),
            replies=(Message(role="tool", content=answer, tool_call_id="0"),),
            reward=0.0,
            engine_seconds=0.4,
            env_seconds=0.001,
        )

    subject = "zeppelin" if number == 0 else random.choice(words)
    won = random.random() < 0.3
    return Trajectory(
        task_key=f"github-close-{number // 8:04d}",
        env_key=ENVS[number // 8 % len(ENVS)],
        sample=number % 8,
        prompt=(Message(role="user", content=f"Close the {subject}."),),
        turns=tuple(turn() for _ in range(TURNS)),
        transcripts=(
            Transcript(
                token_ids=[random.randrange(150_000) for _ in range(TOKENS)],
                loss_mask=[n % 5 == 0 for n in range(TOKENS)],
                logprobs=[-0.5 if n % 5 == 0 else 0.0 for n in range(TOKENS)],
                policy_versions=[1],
            ),
        ),
        ending=Ending.DONE,
        grade=Grade(reward=float(won), success=won),
        seconds=2.5,
    )


def write_run(folder: Path, steps: int) -> Path:
    (folder / "config.yaml").write_text(dump_yaml(load_config("", [])))
    random = Random(0)
    first = train_path(folder / "trajectories", 1)
    with EpisodeWriter(first) as writer:
        for number in range(PER_STEP):
            writer.add(made_up(number, random))
    for step in range(2, steps + 1):
        copy = train_path(folder / "trajectories", step)
        shutil.copyfile(first, copy)
        shutil.copyfile(index_path(first), index_path(copy))
    return folder


@contextmanager
def serving(run: Path) -> Iterator[ViewerServer]:
    with open_viewer(Viewer(open_run(run))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Reader:
    """A page, and the time from an action to its effect."""

    def __init__(self, page: Any, server: ViewerServer) -> None:
        self._page = page
        self._url = server.url

    def timed(self, act: Callable[[], object], shown: str) -> float:
        begun = perf_counter()
        act()
        # A function, because the security policy forbids evaluating text.
        self._page.wait_for_function(f"() => {shown}", timeout=120_000)
        return perf_counter() - begun

    def first_row(self) -> float:
        def act() -> None:
            self._page.goto("about:blank")
            self._page.goto(self._url)

        return self.timed(act, "document.querySelector('.row .task')")

    def filtered(self, env: str, total: int) -> float:
        return self.timed(
            lambda: self._page.select_option("[name=env]", env), _count(f"{total:,} episodes")
        )

    def searched(self, text: str, shown: str) -> float:
        def act() -> None:
            self._page.fill("#filter-text", text)
            self._page.press("#filter-text", "Enter")

        return self.timed(act, _count(shown))

    def opened(self, row: int) -> float:
        before = self._page.url
        shown = f"location.href !== '{before}' && document.querySelector('#turn-{TURNS}')"
        return self.timed(lambda: self._page.locator(".row").nth(row).click(), shown)

    def scrolled(self, total: int) -> float:
        end = "document.getElementById('list').scrollTop = 1e9"
        shown = f"document.querySelector('[aria-posinset=\"{total}\"] .task')"
        return self.timed(lambda: self._page.evaluate(end), shown)

    def classified(self) -> float:
        shown = "!document.getElementById('run-facts').textContent.includes('classifying')"
        return self.timed(lambda: None, shown)


def _count(text: str) -> str:
    return f"document.getElementById('count').textContent.startsWith({text!r})"


def measure(run: Path, steps: int) -> Iterator[tuple[str, float]]:
    total = steps * PER_STEP
    of_env = total // len(ENVS)
    with serving(run) as server, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        reader = Reader(browser.new_page(viewport={"width": 1280, "height": 800}), server)
        yield "first row, before the index is read", reader.first_row()
        yield "first row, while failures are classified", reader.first_row()
        yield "a filter, meanwhile", reader.filtered("github", of_env)
        yield "all failures classified, from there", reader.classified()
        yield "first row, again", median(reader.first_row() for _ in range(5))
        filters = [reader.filtered(env, of_env) for env in ENVS]
        yield "a filter", median(filters)
        reader.filtered("", total)
        yield "from the top to the last row", reader.scrolled(total)
        yield "an episode", median(reader.opened(row) for row in (3, 5, 7, 9, 11))
        yield (
            "a search of all episodes",
            reader.searched("zeppelin", f"{steps:,} episodes found"),
        )
        yield "a search up to its limit", reader.searched("close the", "First")
        browser.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=STEPS, help="of 400 episodes each")
    steps = arguments.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        begun = perf_counter()
        run = write_run(Path(folder), steps)
        size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        print(
            f"{date.today()}, {system()} {machine()}, {os.cpu_count()} cores, "
            f"Python {python_version()}: {steps * PER_STEP:,} episodes of {TURNS} turns, "
            f"{size / 1e6:,.0f} MB, made in {perf_counter() - begun:.1f} s\n"
        )
        print("| what | seconds |\n|---|---:|", flush=True)
        for what, seconds in measure(run, steps):
            print(f"| {what} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
