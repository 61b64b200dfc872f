"""WandbTracker: Weights & Biases, with entity, project and API key by modality."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skyfleet.config.tracking import Wandb, list_wandb_keys
from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.redaction import redact, redact_value
from skyfleet.tracking import background
from skyfleet.tracking.background import BackgroundTracker, RunState

logger = logging.getLogger(__name__)

INIT_SECONDS = 30
"""How long the start of a run waits for W&B; WANDB_INIT_TIMEOUT replaces it."""

_EXIT_CODES: dict[RunState, int] = {"finished": 0, "failed": 1, "killed": 255}
"""From these W&B derives the state that it shows."""


def _has_secrets(arguments: list[str]) -> bool:
    return redact_value(arguments) != arguments or any(redact(a) != a for a in arguments)


def _choose(name: str, value: str | Mapping[str, str] | None, modality: str | None) -> str | None:
    """A setting, or its value for the modality."""
    if value is None or isinstance(value, str):
        return value
    if modality is None:
        raise ConfigError(
            f"trainer.wandb.{name} has one value per modality, and the modality is not known; set "
            "trainer.wandb.modality or the environment variable MODALITY"
        )
    if modality not in value:
        raise ConfigError(
            f"trainer.wandb.{name} has no value for the modality {modality!r}; add it to {sorted(value)}"
        )
    return value[modality]


def _find_api_key(modality: str | None) -> dict[str, str]:
    """The key of the modality; empty leaves it to W&B: WANDB_API_KEY, or a login."""
    names = list_wandb_keys(modality)[:-1]
    key = next((key for name in names if (key := os.environ.get(name))), None)
    return {"api_key": key} if key else {}


WANDB_URL = "https://api.wandb.ai"
OFFLINE_MODES = ("offline", "disabled", "dryrun")


def check_login(settings: Wandb) -> None:
    """Raise if nothing here names a key of W&B, which then would refuse after the policy is loaded."""
    environ = os.environ
    names = list_wandb_keys(settings.modality or environ.get("MODALITY") or None)
    url = environ.get("WANDB_BASE_URL") or WANDB_URL
    has_key = any(environ.get(name) for name in (*names, "WANDB_IDENTITY_TOKEN_FILE"))
    # With a terminal W&B asks for the key.
    if environ.get("WANDB_MODE") in OFFLINE_MODES or has_key or sys.stdin.isatty():
        return
    if not read_login(url):
        raise ConfigError(
            f"trainer.logger has wandb, and {' and '.join(names)} "
            f"{'is' if len(names) == 1 else 'are'} not set; export one, run wandb login, or set "
            "WANDB_MODE=offline"
        )


def read_login(url: str) -> str:
    """What `wandb login` stored for a server."""
    try:
        found = netrc(os.environ.get("NETRC")).authenticators(urlsplit(url).hostname or "")
    except (OSError, NetrcParseError):
        return ""
    return found[2] or "" if found else ""


class WandbTracker(BackgroundTracker):
    """Weights & Biases, online or offline as WANDB_MODE says.

    A resumed run becomes a new W&B run of the same name and group, because W&B does not rewrite
    history. The group is the run's name. A server that does not answer makes the run an offline one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project_name: str,
        run_name: str,
        config: Mapping[str, object],
        resume_step: int | None = None,
        settings: Wandb | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("wandb", "wandb") from None
        settings = settings or Wandb()
        modality = settings.modality or os.environ.get("MODALITY") or None
        entity = _choose("entity", settings.entity, modality)
        project = _choose("project", settings.project, modality) or project_name
        had_files = (folder / "wandb").exists()
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        options = {
            "entity": entity,
            "project": project,
            "name": run_name,
            "group": run_name,
            "dir": folder,
            "config": {**config, "resumed_at_step": resume_step},
        }
        chosen = {
            # The metadata that W&B collects contain the command line.
            "x_disable_meta": _has_secrets(sys.argv),
            # Otherwise W&B's own process waits for its server without end, and this one for it.
            "finish_timeout": 0.8 * background.DRAIN_SECONDS,
            "finish_timeout_raises": True,
            **_find_api_key(modality),
        }
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            chosen["init_timeout"] = INIT_SECONDS
        try:
            self._run: Any = _start(wandb, options, chosen)
        except wandb.Error as error:
            if not had_files:
                shutil.rmtree(folder / "wandb", ignore_errors=True)
            for path in created:
                with suppress(OSError):  # another process has put a file there since
                    path.rmdir()
            raise ConfigError(
                f"trainer.logger='wandb': {redact(str(error))} Or set WANDB_MODE=offline, or choose "
                "'jsonl'"
            ) from error
        super().__init__("W&B", end_run=self._finish_run)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        row = dict(metrics)
        self.call(lambda: self._run.log(row, step=step))

    def attach(self, name: str, text: str) -> None:
        self.call(lambda: self._store(name, text))

    def _finish_run(self, state: RunState) -> None:
        self._run.finish(exit_code=_EXIT_CODES[state])

    def _store(self, name: str, text: str) -> None:
        path = Path(self._run.dir) / name
        path.write_text(text, encoding="utf-8")
        self._run.save(str(path), base_path=self._run.dir, policy="now")


def _start(wandb: Any, options: Mapping[str, object], chosen: Mapping[str, object]) -> Any:
    """Start a W&B run; offline if the server does not answer. Raise if it refuses."""
    try:
        return wandb.init(**options, settings=wandb.Settings(**chosen))
    except wandb.Error as error:
        # W&B has one exception for a server that refuses and for one that cannot be reached.
        answered = isinstance(error, wandb.errors.CommError) and "Timed out" not in str(error)
        if answered or isinstance(error, wandb.errors.UsageError):
            raise
        offline = {**chosen, "mode": "offline", "init_timeout": 4 * INIT_SECONDS}
        run = wandb.init(**options, settings=wandb.Settings(**offline))
        logger.warning(
            "W&B does not answer: %s; the run goes on and W&B's rows stay in its folder: upload them "
            "later with `wandb sync %s`",
            redact(str(error).partition("\n")[0]),
            Path(run.dir).parent,
        )
        return run
