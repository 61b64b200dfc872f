"""Exports beside the run folder, in the formats that SkyRL's tools read."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from skyfleet.algorithms.sample import Sample
from skyfleet.config.root import RunConfig
from skyfleet.learner.policy_model import PolicyModel
from skyfleet.models.loading import save_model
from skyfleet.storage.local import atomic_folder, make_folder, sweep, write_atomically
from skyfleet.trajectories.skyrl_dump import write_training_dump
from skyfleet.trajectories.trajectory import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Exports:
    folder: Path
    save_policy: Callable[[Path], None]
    """Writes a Hugging Face model into an empty folder."""
    text: Callable[[Sequence[int]], str]
    data_batch: bool = False
    training_trajectories: bool = False

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        policy_model: PolicyModel,
        save_policy: Callable[[Path], None] | None = None,
    ) -> Exports:
        """`save_policy` is that of a learner in other processes; None if `policy_model` is trained."""
        trainer = config.trainer
        return cls(
            folder=Path(trainer.export_path),
            save_policy=save_policy or partial(save_model, policy_model.loaded),
            text=policy_model.renderer.text,
            data_batch=trainer.dump_data_batch,
            training_trajectories=trainer.dump_training_trajectories,
        )

    def dump_trajectories(self, step: int, groups: Sequence[Group]) -> None:
        if self.training_trajectories:
            path = self.folder / "dumped_training_trajectories" / f"global_step_{step}.jsonl"
            write_training_dump(path, step, groups, text=self.text)

    def dump_training_input(self, step: int, samples: Sequence[Sample]) -> None:
        """The learner's input as plain dictionaries, which any Python unpickles."""
        if self.data_batch:
            path = self.folder / "dumped_data" / f"global_step_{step}_training_input.pkl"
            make_folder(path.parent)
            write_atomically(path, pickle.dumps([asdict(sample) for sample in samples]))

    def export_policy(self, step: int) -> None:
        with atomic_folder(self._policy_folder(step)) as draft:
            self.save_policy(draft)

    def has_policy(self, step: int) -> bool:
        return self._policy_folder(step).exists()

    def _policy_folder(self, step: int) -> Path:
        return self.folder / f"global_step_{step}" / "policy"


def sweep_exports(folder: Path) -> None:
    """Remove what a killed process left half-written; an export being replaced is restored."""
    for parent in folder.glob("global_step_*"):
        sweep(parent, "policy")
        if not any(parent.iterdir()):
            parent.rmdir()
    for dumps in folder.glob("dumped_*"):
        for draft in dumps.rglob(".*.draft"):
            draft.unlink(missing_ok=True)
