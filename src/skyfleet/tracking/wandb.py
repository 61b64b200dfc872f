"""WandbTracker: Weights & Biases, online or offline as the user's environment says."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
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
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project_name, name=run_name, dir=folder, config=dict(config)
            )
        except wandb.Error as error:
            if is_new:
                shutil.rmtree(folder)
            raise ConfigError(
                f"trainer.logger='wandb': {error} Or set WANDB_MODE=offline, or choose 'jsonl'"
            ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
