"""Kill runs at random moments, and cut every write of a run; the same command must finish each one.

`python -m benchmarks.crash_consistency kills --count 300`, `... journal` and `... cuts`, from the
repository's root. `journal` kills during rollouts and learning only, and counts the episodes that
are played. `cuts` needs strace (`apt install strace`).
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: a forked run must not find its threads

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes.crash_runs import describe_run, list_differences, start_run, wait_for, warm_up
from tests.fakes.recorded_writes import LOSSES, Call, Disk, read_calls, record
from tests.fakes.watched_journal import (
    OPENED,
    RECORDED,
    count_repeated_records,
    has_mixed_step,
    list_relearnt_differences,
    read_count,
    watch_journal,
)

SHORT = (
    "trainer.max_training_steps=2",
    "trainer.hf_save_interval=1",
    "trainer.eval_interval=2",
    "trainer.max_ckpts_to_keep=1",
)
MAX_KILLS = 8
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["kills", "journal", "signals", "cuts"])
    parser.add_argument("--count", type=int, default=300, help="kills over all configurations")
    parser.add_argument("--every", type=int, default=1, help="cut only every so many calls")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as temporary:
        folder = Path(temporary)
        with redirect_stdout(sys.stderr):
            configurations = warm_up(folder)
        watch_journal()
        if arguments.what == "cuts":
            _cut_calls(folder, configurations["every step"], arguments.every)
        else:
            by = SIGNALS if arguments.what == "signals" else (signal.SIGKILL,)
            kills = Kills(
                signals=by,
                rng=random.Random(arguments.seed),
                within_steps=arguments.what == "journal",
            )
            _kill_runs(folder, configurations, arguments.count, kills)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    signals: Sequence[signal.Signals]
    rng: random.Random
    within_steps: bool
    """At a random episode instead of a random moment, which may be before the first step."""

    def run(self, folder: Path, overrides: Sequence[str], seconds: float, n_episodes: int) -> int:
        """Start the run and kill it; returns its exit code, 0 if it was done before."""
        by, child = self.rng.choice(list(self.signals)), start_run(folder, overrides)
        if not self.within_steps:
            moment = self.rng.uniform(0, 0.8 * seconds)
            return wait_for(child, kill_after_cpu_seconds=moment, by=by)[0]
        recorded, opened = folder / RECORDED, folder / OPENED
        last = self.rng.randint(read_count(recorded), n_episodes)
        before, more = read_count(opened), self.rng.random() < 0.5

        def has_come() -> bool:
            """So many episodes are recorded, or another one has begun."""
            return read_count(recorded) >= last and (not more or read_count(opened) > before)

        return wait_for(child, kill_when=has_come, by=by)[0]


def _kill_runs(
    folder: Path, configurations: dict[str, tuple[str, ...]], count: int, kills_by: Kills
) -> None:
    print(
        "| configuration | kills | runs | stuck | different | two processes in a step "
        "| episodes finished | opened | finished and played again | exit codes of killed runs |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, overrides in configurations.items():
        straight = folder / "straight"
        code, seconds = wait_for(start_run(straight, overrides))
        assert code == 0, (straight / "log.txt").read_text()
        expected, n_episodes = describe_run(straight), read_count(straight / RECORDED)
        kills = runs = n_mixed = n_opened = n_finished = n_repeated = 0
        codes: Counter[int] = Counter()
        faults: Counter[str] = Counter()
        while kills < -(-count // len(configurations)):
            runs += 1
            killed = folder / f"killed {runs}"
            for _ in range(kills_by.rng.randint(1, MAX_KILLS)):
                code = kills_by.run(killed, overrides, seconds, n_episodes)
                if code == 0:
                    break
                kills += 1
                codes[code] += 1
            faults[_finish(killed, overrides, expected)] += 1
            n_mixed += has_mixed_step(killed)
            n_opened += read_count(killed / OPENED)
            n_finished += n_episodes
            played_again = read_count(killed / RECORDED) - n_episodes
            n_repeated += max(played_again, count_repeated_records(killed))
            shutil.rmtree(killed)
        shutil.rmtree(straight)
        counts = [kills, runs, faults["stuck"], faults["different"], n_mixed]
        counts += [n_finished, n_opened, n_repeated]
        print(f"| {name} | {' | '.join(map(str, counts))} | {dict(codes)} |", flush=True)


def _finish(folder: Path, overrides: Sequence[str], expected: dict[str, Any]) -> str:
    """Run the same command until it ends: `same`, `different` or `stuck`.

    A step that two processes sampled may have other logprobs in the last digits than in one process.
    """
    code, _ = wait_for(start_run(folder, overrides))
    if code != 0:
        print(f"stuck with exit code {code}:", (folder / "log.txt").read_text()[-2000:])
        return "stuck"
    if has_mixed_step(folder):
        differences = list_relearnt_differences(folder, overrides)
    else:
        differences = list_differences(expected, describe_run(folder))
    if differences:
        print("different:", *differences, (folder / "log.txt").read_text()[-3000:], sep="\n")
        return "different"
    return "same"


def _cut_calls(folder: Path, overrides: Sequence[str], every: int) -> None:
    overrides = (*overrides, *SHORT)
    straight, trace = folder / "straight", folder / "trace.txt"
    straight.mkdir()
    script = (
        "import sys; from pathlib import Path; from tests.fakes.crash_runs import *; "
        "install_env(); run_here(Path.cwd(), sys.argv[1:])"
    )
    record([sys.executable, "-c", script, *overrides], trace, cwd=straight)
    expected = describe_run(straight)
    calls = list(read_calls(trace))
    disks = _list_disks(straight, calls, folder / "disk", every)
    print("| lost | calls cut | different disks | stuck | different |")
    print("|---|---|---|---|---|")
    faults: Counter[tuple[str, str]] = Counter()
    cuts: Counter[str] = Counter()
    for loss in LOSSES:
        for number, is_new, disk in disks(loss):
            cuts[loss] += 1
            if not is_new:
                continue
            outcome = _finish(disk, overrides, expected)
            faults[loss, outcome] += 1
            if outcome != "same":
                print(f"^ after call {number}, {loss} lost: {calls[number].name}", flush=True)
        outcomes = [faults[loss, kind] for kind in ("same", "stuck", "different")]
        print(
            f"| {loss} | {cuts[loss]} | {sum(outcomes)} | {outcomes[1]} | {outcomes[2]} |",
            flush=True,
        )


def _list_disks(root: Path, calls: Sequence[Call], target: Path, every: int) -> Any:
    """For a kind of loss: the disk after every call, and whether it was not seen before."""
    seen: set[str] = set()

    def disks(loss: Any) -> Any:
        disk, changes = Disk(root), 0
        for number, call in enumerate(calls):
            if not disk.apply(call):
                continue
            changes += 1
            if changes % every:
                continue
            shutil.rmtree(target, ignore_errors=True)
            digest = disk.write_to(target, loss)
            is_new = digest not in seen
            seen.add(digest)
            yield number, is_new, target

    return disks


if __name__ == "__main__":
    main()
