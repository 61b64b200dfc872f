"""A machine of a cloud on loopback: a home folder in which a launch task's own commands run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import psutil
import yaml

ROOT = Path(__file__).parents[1]
VENVS = "venv-*"
_PASSED_ON = ("LANG", "LC_", "PIP_", "PYENV_", "SSL_", "REQUESTS_CA", "http", "HTTP", "no_proxy")
"""The beginnings of variables that a machine gets from this process: pip needs them."""
_WAIT_SECONDS = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTask:
    """What SkyPilot would take from a task file."""

    envs: Mapping[str, str]
    setup: str
    run: str


def read_task(path: Path) -> LaunchTask:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    envs = {name: "" if value is None else str(value) for name, value in content["envs"].items()}
    return LaunchTask(envs=envs, setup=content["setup"], run=content["run"])


@dataclass(slots=True, kw_only=True)
class Command:
    """A running command, with what it has printed so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    reader: Thread | None = None

    def follow(self, show: Callable[[str], None]) -> None:
        def read() -> None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
                show(self.lines[-1])

        self.reader = Thread(target=read, daemon=True)
        self.reader.start()

    def wait(self) -> int:
        code = self.process.wait(timeout=_WAIT_SECONDS)
        if self.reader is not None:
            self.reader.join(timeout=10)
        return code


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    home: Path
    task: LaunchTask
    variables: Mapping[str, str]
    """Instead of the task file's, as `sky launch --env` gives them."""

    @property
    def workdir(self) -> Path:
        """Where SkyPilot copies the clone to."""
        return self.home / "sky_workdir"

    @property
    def state(self) -> Path:
        return self.home / ".skyfleet"

    def clear(self, *, keep_venv: bool) -> None:
        """Remove everything, or everything but the virtual environments."""
        kept = list(self.state.glob(VENVS)) if keep_venv else []
        for path in [*self.home.glob("*"), *self.home.glob(".*")]:
            if path != self.state or not kept:
                _remove(path)
        for path in self.state.glob("*") if kept else ():
            if path not in kept:
                _remove(path)
        self.home.mkdir(parents=True, exist_ok=True)

    def copy_clone(self) -> None:
        """Copy what git does not ignore, as SkyPilot does."""
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, names.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.workdir / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.workdir / name)

    def start(self, script: str, show: Callable[[str], None], **variables: str) -> Command:
        """Run one of the task's scripts by bash in the clone, as SkyPilot does."""
        command = Command(
            process=subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.workdir,
                env={**self._environment(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        command.follow(show)
        return command

    def kill_trainer(self) -> None:
        """SIGKILL; returns when it has ended."""
        trainer = psutil.Process(int((self.state / "trainer.pid").read_text()))
        trainer.kill()
        trainer.wait(timeout=60)

    def list_processes(self) -> list[psutil.Process]:
        """All processes whose HOME is this machine's."""
        return [one for one in psutil.process_iter() if _read_home(one) == str(self.home)]

    def kill(self) -> int:
        """SIGKILL to everything at once, as when the machine is lost; returns how many."""
        killed = 0
        while found := self.list_processes():  # one may have started another meanwhile
            for process in found:
                try:
                    process.kill()
                    killed += 1
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(found, timeout=10)
        return killed

    def _environment(self) -> dict[str, str]:
        passed_on = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
        for config in (".config/pip/pip.conf", ".pip/pip.conf"):
            if (Path.home() / config).is_file():
                passed_on.setdefault("PIP_CONFIG_FILE", str(Path.home() / config))
        passed_on.setdefault("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
        # The Python of this process first, not its virtual environment.
        path = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
        task = {**self.task.envs, **self.variables}
        return {**passed_on, "PATH": path, "HOME": str(self.home), "OMP_NUM_THREADS": "1", **task}


def wait_until(
    is_true: Callable[[], bool], what: str, process: subprocess.Popen[str] | None = None
) -> None:
    """Poll; an error if it takes too long, or if the process ends first."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not is_true():
        if process is not None and process.poll() is not None:
            raise SystemExit(f"loopback: the command ended ({process.returncode}) before {what}")
        if time.monotonic() > deadline:
            raise SystemExit(f"loopback: waited {_WAIT_SECONDS} s in vain: {what}")
        time.sleep(0.03)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read_home(process: psutil.Process) -> str | None:
    try:
        home: str | None = process.environ().get("HOME")
    except (psutil.Error, OSError):
        return None
    return home
