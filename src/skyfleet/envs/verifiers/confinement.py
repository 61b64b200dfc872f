"""Find out by trying which of the two sandboxes for verifiers works on this machine.

bubblewrap needs a program and user namespaces, the system call filter a kernel that accepts it; a
container may refuse either. Where neither works, verifiers of others are not run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import skyfleet
from skyfleet.config.environment import Environment
from skyfleet.config.root import RunConfig
from skyfleet.envs.verifiers.run_verifier import BrokenVerifierError
from skyfleet.envs.verifiers.write_verifier import is_written_here
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task

ALLOW_KEY = "environment.verifier.allow_unconfined"

_PACKAGE = Path(skyfleet.__file__).parent
_PYTHON = os.path.realpath(sys.executable)
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
_PROBE_SECONDS = 60.0

_FILTERED, _UNFILTERED = 70, 71
"""Exit statuses of the probe; any other means that it did not run."""

# After the filter is installed, a call outside the filter must fail for this one reason.
_PROBE = f"""
import os
from skyfleet.envs.verifiers.seccomp import install_filter
try:
    install_filter()
except OSError as error:
    os.write(2, str(error).encode())
    os._exit({_UNFILTERED})
try:
    os.listdir("/")
except PermissionError:
    os._exit({_FILTERED})
os.write(2, b"the kernel accepts the filter and does not apply it")
os._exit({_UNFILTERED})
"""


class UnconfinedVerifierError(BrokenVerifierError):
    """This machine has no sandbox for a verifier, and the configuration does not allow to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """What confines verifiers here."""

    bwrap: str | None
    """The path of a bubblewrap that works."""
    bwrap_problem: str
    has_filter: bool
    """Whether the kernel applies the system call filter."""
    filter_problem: str

    @property
    def is_missing(self) -> bool:
        return self.bwrap is None and not self.has_filter

    def require(self) -> None:
        """Raise UnconfinedVerifierError if nothing confines a verifier."""
        if self.is_missing:
            raise UnconfinedVerifierError(
                f"{ALLOW_KEY}=false, and nothing confines verifier_code on this machine "
                f"({self.bwrap_problem}; system call filter: {self.filter_problem}); install "
                "bubblewrap (apt install bubblewrap) and allow user namespaces, or set the key to "
                "true if every verifier may do what this user can"
            )


@cache
def probe_confinement(bwrap: str = "bwrap") -> Confinement:
    """Try both sandboxes once per process, each with the command that workers use."""
    path, bwrap_problem = shutil.which(bwrap), f"{bwrap} is not installed"
    if path is not None:
        status, problem = _run_probe(build_bwrap_command(path, _PROBE))
        if status in (_FILTERED, _UNFILTERED):
            return Confinement(
                bwrap=path,
                bwrap_problem="",
                has_filter=status == _FILTERED,
                filter_problem=problem,
            )
        bwrap_problem = problem
    status, problem = _run_probe(build_plain_command(_PROBE))
    return Confinement(
        bwrap=None,
        bwrap_problem=bwrap_problem,
        has_filter=status == _FILTERED,
        filter_problem=problem,
    )


def check_verifiers(config: RunConfig, tasks: Iterable[Task]) -> None:
    """Raise ConfigError if a task's verifier would run here and nothing confines it."""
    environment = config.environment
    if environment.verifier.allow_unconfined or not any(
        _runs_here(environment, task) for task in tasks
    ):
        return
    try:
        probe_confinement().require()
    except UnconfinedVerifierError as error:
        raise ConfigError(str(error)) from error


def _runs_here(environment: Environment, task: Task) -> bool:
    code, env_key = task.verifier_code, task.env_key
    name = environment.env_classes.get(env_key) or task.env_class or environment.env_class
    if code is None or is_written_here(code):
        return False
    return name == "world" or (name == "mcp" and environment.mcp.seed_uri is not None)


def _run_probe(command: list[str]) -> tuple[int, str]:
    """Return the exit status and the last line of stderr."""
    try:
        ended = subprocess.run(
            command, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    # The first sentence: bubblewrap goes on with where to read more.
    last = lines[-1].split(". ")[0] if lines else f"exit status {ended.returncode}"
    return ended.returncode, "" if ended.returncode == _FILTERED else last


def build_plain_command(program: str) -> list[str]:
    """Run a Python program that can import this package."""
    return _build_python_command(_PACKAGE.parent, program)


def build_bwrap_command(bwrap: str, program: str) -> list[str]:
    """The same in bubblewrap: the program sees Python's own files, read-only, and nothing else."""
    needed = dict.fromkeys([*_LIBRARIES, f"{sys.base_prefix}/lib", _PYTHON])
    binds = [word for path in needed for word in ("--ro-bind-try", path, path)]
    namespaces = ["--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    isolation = ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    package = ["--ro-bind", str(_PACKAGE), "/jail/skyfleet", "--dev-bind", os.devnull, os.devnull]
    root = ["--remount-ro", "/", "--chdir", "/", "--"]
    return [
        *(bwrap, *namespaces, *isolation, *binds, *package, *root),
        *_build_python_command(Path("/jail"), program),
    ]


def _build_python_command(root: Path, program: str) -> list[str]:
    # -I and -S: neither the environment nor an installed package affects how it starts.
    return [
        _PYTHON,
        "-I",
        "-S",
        "-B",
        "-c",
        f"import sys; sys.path.append({str(root)!r})\n{program}",
    ]
