"""What a run hands out, from configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from skyfleet.config.root import RunConfig
from skyfleet.models.loading import save_model
from skyfleet.trainer.assemble_policy import PolicyModel
from skyfleet.trainer.exports import Exports


def build_exports(config: RunConfig, policy_model: PolicyModel) -> Exports:
    trainer = config.trainer
    return Exports(
        folder=Path(trainer.export_path),
        save_policy=partial(save_model, policy_model.loaded),
        text=policy_model.renderer.text,
        data_batch=trainer.dump_data_batch,
        training_trajectories=trainer.dump_training_trajectories,
    )
