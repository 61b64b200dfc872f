"""Import a package from the folder that an environment variable names, and check its version."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from skyfleet.envs.tau.litellm_stub import stub_litellm
from skyfleet.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A public package that is used from a checkout, unmodified."""

    name: str
    """Its Python package."""
    repository: str
    variable: str
    """The environment variable that names the checkout."""
    source: str
    """The folder of the checkout that contains the Python package."""
    required_file: str
    """Below the Python package; another package of the same name has no such file."""
    hashed: Sequence[str]
    """Patterns below the Python package: the files that decide tasks, tools and rewards."""
    needs: str = ""
    """How to install what the package imports, for an error message."""
    tested_commit: str
    tested_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    package: Package
    path: Path
    is_tested: bool
    """Whether its files are those of the commit that the adapter was tested with."""


def find_checkout(package: Package) -> Checkout:
    """Find the package without importing it; ConfigError if the variable does not name it."""
    variable = package.variable
    remedy = f"clone {package.repository} from GitHub and set {variable} to its folder"
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(f"{variable} is not set; {remedy}")
    path = Path(value).expanduser().absolute()
    source = path / package.source
    if not (source / package.name / package.required_file).is_file():
        raise ConfigError(
            f"{variable}={value} holds no {Path(package.source) / package.name / package.required_file}"
            f"; {remedy}"
        )
    fingerprint = _hash_files(source / package.name, package.hashed)
    is_tested = fingerprint == package.tested_fingerprint
    if not is_tested:
        logger.warning(
            "%s=%s is not the tested version of %s (commit %s); rewards may differ, and what is known "
            "of its tasks in advance is not used",
            variable,
            value,
            package.repository,
            package.tested_commit[:12],
        )
    return Checkout(package=package, path=path, is_tested=is_tested)


@contextmanager
def importing(checkout: Checkout) -> Iterator[None]:
    """Import modules of the checkout, without litellm, inside this block."""
    package = checkout.package
    source = checkout.path / package.source
    sys.path.insert(0, str(source))
    try:
        with stub_litellm():
            file = import_module(package.name).__file__
            if file is None or not Path(file).is_relative_to(source):
                raise ConfigError(
                    f"another package named {package.name} is already imported from {file}; uninstall "
                    f"it, or import the tasks of {package.repository} first"
                )
            yield
    except ImportError as error:
        raise ConfigError(
            f"{package.variable}={checkout.path}: {package.name} cannot be imported ({error}); "
            f"install what it needs{package.needs}"
        ) from error
    finally:
        sys.path.remove(str(source))


def _hash_files(folder: Path, patterns: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
        digest.update(f"{file.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
