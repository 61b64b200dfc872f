"""WandbTracker: Weights & Biases, online or offline as the user's environment says."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from skyfleet.errors import ConfigError, MissingExtraError


class WandbTracker:
    """A resumed run is a new W&B run of the same name: the old one's history is not rewritten."""

    def __init__(
        self, folder: Path, *, project_name: str, run_name: str, config: Mapping[str, object]
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("wandb", "wandb") from None
        had_files = (folder / "wandb").exists()
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project_name, name=run_name, dir=folder, config=dict(config)
            )
        except wandb.Error as error:
            if not had_files:
                shutil.rmtree(folder / "wandb", ignore_errors=True)
            for path in made:
                with suppress(OSError):  # somebody else has put something there since
                    path.rmdir()
            raise ConfigError(
                f"trainer.logger='wandb': {error} Or set WANDB_MODE=offline, or choose 'jsonl'"
            ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
