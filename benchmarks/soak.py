"""Train while 5 % of all calls fail at random, restart what ends, and compare with runs without faults.

    python -m benchmarks.soak --minutes 30 --seed 0 --folder runs/soak

A supervisor starts `skyfleet train tiny` with the faults of `benchmarks/soak_faults.py`, and the same
command again whenever it ends with an error, until its steps or the minutes are over. Meanwhile the same
training without faults runs on the other core, and again with further seeds while there is time. All
start from one policy. Then each plays the held-out tasks without faults. One environment of three is
played over HTTP. Every event is a line of FOLDER/events.jsonl when it happens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.soak_faults import Faults, FaultyNetwork
from benchmarks.soak_report import count_calls, find_cause, read_rows, write_results

from skyfleet.checkpoints.resume import find_checkpoint
from skyfleet.envs.agent_gateway import LoopbackServer
from skyfleet.tasks.loading import write_tasks
from skyfleet.worlds.catalog import tasks_from_source
from skyfleet.worlds.fleet_server.server import build_fleet_app

KEY = "local-key"
WORLDS = ("booking", "github", "reddit")
REMOTE = "reddit"
"""Its episodes are played over HTTP, on a Fleet-compatible server."""
UNSEEN = "unseen_tasks"
N_TRAIN, ATTEMPTS = 360, 4
STOP_SECONDS = 60


class Launcher:
    """Runs commands one after the other, each forked from a process with torch already imported."""

    def __init__(self, folder: Path, name: str, note: Any) -> None:
        self._folder, self._name, self._note = folder, name, note
        self._number = self._burst_left = 0
        self.pid: int | None = None
        """Of the command that is running."""

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.soak_child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def run(
        self, command: Sequence[str], run: Path, *, url: str, rate: float = 0.0, seed: str = ""
    ) -> int:
        number, self._number = self._number, self._number + 1
        output = self._folder / "output" / f"{self._name}_{number:04d}.txt"
        log = output.with_suffix(".jsonl")
        request = {
            "command": list(command),
            "run": str(run),
            "output": str(output),
            "log": str(log),
            "environ": {"FLEET_API_KEY": KEY, "FLEET_BASE_URL": url},
            "rate": rate,
            "seed": f"{seed}/{number}",
            "burst_left": self._burst_left,
        }
        started = time.monotonic()
        self._process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
        self.pid = (await self._answer())["pid"]
        code = int((await self._answer())["code"])
        self.pid = None
        if rows := read_rows(log):
            self._burst_left = rows[-1]["burst_left"]
        saved = find_checkpoint(run / "checkpoints", "latest")
        self._note(
            "ended",
            by=self._name,
            number=number,
            what=command[0],
            code=code,
            lived=round(time.monotonic() - started, 1),
            step=saved.step if saved else None,
            cause=find_cause(output, code, self._folder),
            calls=count_calls([log]),
        )
        return code

    def end(self, by: signal.Signals) -> None:
        """SIGTERM, as a cluster ends a job, saves a checkpoint."""
        if self.pid is not None:
            self._note("signal", by=self._name, sent=by.name)
            with suppress(ProcessLookupError):
                os.kill(self.pid, by)

    async def stop(self) -> None:
        self.end(signal.SIGKILL)
        self._process.stdin.close()  # type: ignore[union-attr]
        await self._process.wait()

    async def _answer(self) -> dict[str, Any]:
        line = await self._process.stdout.readline()  # type: ignore[union-attr]
        return dict(json.loads(line))


class Soak:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder: Path = arguments.folder.resolve()
        self.seed, self.steps, self.rate = arguments.seed, arguments.steps, arguments.rate
        self.seconds = arguments.minutes * 60
        self.warm_steps = arguments.warm_start_steps
        self.n_held_out = arguments.held_out
        self.base: Path | None = arguments.base
        (self.folder / "output").mkdir(parents=True)
        self.started = time.monotonic()
        self.network = Faults(self.rate, f"{self.seed}/network")
        self.with_faults = Launcher(self.folder, "faults", self.note)
        self.without = Launcher(self.folder, "healthy", self.note)
        self.urls = {"faults": "", "healthy": ""}
        self.end = self.started + self.seconds
        self.is_over = False
        """The training with faults has ended."""

    def note(self, event: str, **fields: Any) -> None:
        row = {"seconds": round(time.monotonic() - self.started, 1), "event": event, **fields}
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def _data(self) -> list[str]:
        """Fewer tasks than the preset, of the same worlds; one of them is played over HTTP."""
        return [
            f"data.train_data=[{self.folder}/train.json]",
            "data.val_data={}",
            "data.allow_unmanifested=true",
            "data.held_out_envs=[]",
            f"environment.env_classes={{{REMOTE}: fleet_task}}",
            "generator.max_input_length=768",
            f"generator.eval_n_samples_per_prompt={ATTEMPTS}",
        ]

    async def run(self) -> None:
        async with self._serve():
            await asyncio.gather(self.with_faults.start(), self.without.start())
            try:
                await self._prepare()
                self.note("start", minutes=self.seconds / 60, steps=self.steps, rate=self.rate)
                self.end = time.monotonic() + self.seconds
                healthy = asyncio.create_task(self._train_healthy())
                await self._train_with_faults()
                step = await self._settle()
                runs = await healthy
                await self._evaluate(step, runs)
            finally:
                await asyncio.gather(self.with_faults.stop(), self.without.stop())
        write_results(self.folder, step, runs)

    @asynccontextmanager
    async def _serve(self) -> AsyncIterator[None]:
        app = build_fleet_app([], api_key=KEY)
        faulty, healthy = LoopbackServer(app), LoopbackServer(build_fleet_app([], api_key=KEY))
        # Outermost, because it resets connections.
        faulty.config.app = FaultyNetwork(faulty.config.app, self.network)
        self.urls = {"faults": faulty.url, "healthy": healthy.url}
        try:
            yield
        finally:
            await asyncio.gather(faulty.stop(), healthy.stop())

    async def _prepare(self) -> None:
        """Write the tasks, and warm-start the policy that every training starts from."""
        for name, split, count in (
            ("train", "train", N_TRAIN),
            ("held_out", UNSEEN, self.n_held_out),
        ):
            sources = [f"{world}?split={split}&count={count}&max_difficulty=1" for world in WORLDS]
            tasks = [task for source in sources for task in tasks_from_source(f"world:{source}")]
            write_tasks(self.folder / f"{name}.json", tasks)
        if self.base is None:
            run = self.folder / "base"
            command = [
                *("train", "tiny"),
                *self._data,
                f"trainer.run_path={run}",
                f"trainer.seed={self.seed}",
                f"trainer.warm_start.steps={self.warm_steps}",
                "trainer.max_training_steps=1",
                "trainer.eval_interval=-1",
            ]
            code = await self.without.run(command, run, url=self.urls["healthy"])
            assert code == 0, (
                f"the warm start ended with exit code {code}; see {self.folder}/output"
            )
            self.base = run / "checkpoints" / "global_step_0" / "policy"

    def _command(self, run: Path, seed: int, steps: int, *, keeps_all: bool = False) -> list[str]:
        """With faults it saves every second step; without, every one is saved and stays."""
        return [
            *("train", "tiny"),
            *self._data,
            f"trainer.policy.model.path={self.base}",
            "trainer.policy.model_config_kwargs={}",
            # Two steps, because the reference solutions are rolled out with faults, too.
            "trainer.warm_start={steps: 2, tasks: 8, batch_size: 8, lr: 1.0e-4}",
            f"trainer.run_path={run}",
            f"trainer.seed={seed}",
            f"trainer.max_training_steps={steps}",
            "trainer.eval_interval=-1",
            f"trainer.ckpt_interval={1 if keeps_all else 2}",
            f"trainer.max_ckpts_to_keep={-1 if keeps_all else 2}",
        ]

    async def _train_with_faults(self) -> None:
        run, loop = self.folder / "faults", asyncio.get_running_loop()
        command = self._command(run, self.seed, self.steps)
        while (left := self.end - time.monotonic()) > 0:
            timers = [
                loop.call_later(left, self.with_faults.end, signal.SIGTERM),
                loop.call_later(left + STOP_SECONDS, self.with_faults.end, signal.SIGKILL),
            ]
            code = await self.with_faults.run(
                command, run, url=self.urls["faults"], rate=self.rate, seed=str(self.seed)
            )
            for timer in timers:
                timer.cancel()
            if code == 0:
                break
        self.is_over = True
        calls, failures = dict(self.network.calls), dict(self.network.failures)
        self.note("network", calls=calls, failures=failures)

    async def _settle(self) -> int:
        """The same command without faults, up to the step that was reached; returns the step."""
        run = self.folder / "faults"
        saved = find_checkpoint(run / "checkpoints", "latest")
        assert saved is not None, "no checkpoint was saved"
        command = self._command(run, self.seed, saved.step)
        code = await self.with_faults.run(command, run, url=self.urls["healthy"])
        self.note("settled", code=code, step=saved.step)
        return saved.step

    async def _train_healthy(self) -> list[Path]:
        """The run folders of trainings without faults: the same seed, then others."""
        runs: list[Path] = []
        longest = 0.0
        while not runs or (not self.is_over and self.end - time.monotonic() > longest):
            seed, started = self.seed + len(runs), time.monotonic()
            run = self.folder / f"healthy_{seed}"
            command = self._command(run, seed, self.steps, keeps_all=True)
            code = await self.without.run(command, run, url=self.urls["healthy"])
            assert code == 0, f"a training without faults ended with exit code {code}"
            longest = max(longest, time.monotonic() - started)
            runs.append(run)
        return runs

    async def _evaluate(self, step: int, runs: Sequence[Path]) -> None:
        chosen = [
            (run, number) for run in (self.folder / "faults", *runs) for number in sorted({0, step})
        ]
        queue = list(chosen)

        async def evaluate(launcher: Launcher) -> None:
            while queue:
                run, number = queue.pop(0)
                command = [
                    *("evaluate", "tiny"),
                    *self._data,
                    f"data.val_data={{unseen_tasks: [{self.folder}/held_out.json]}}",
                    f"trainer.seed={self.seed}",
                    f"--checkpoint={run / 'checkpoints' / f'global_step_{number}'}",
                    f"--output={self.folder / 'evaluations' / f'{run.name}_{number}'}",
                ]
                code = await launcher.run(command, run, url=self.urls["healthy"])
                assert code == 0, f"the evaluation of {run} ended with exit code {code}"

        await asyncio.gather(evaluate(self.with_faults), evaluate(self.without))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--steps", type=int, default=60, help="the most steps of a training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.05, help="share of the calls that fail")
    parser.add_argument("--warm-start-steps", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=100, help="evaluated tasks per world")
    parser.add_argument("--base", type=Path, help="a policy to start from, instead of a new one")
    parser.add_argument("--folder", type=Path, required=True, help="must not exist")
    asyncio.run(Soak(parser.parse_args()).run())


if __name__ == "__main__":
    main()
