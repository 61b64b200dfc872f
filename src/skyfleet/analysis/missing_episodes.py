"""MissingEpisodes: steps of a run whose episodes are not in its folder, because they ran elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyfleet.analysis.formatting import format_steps
from skyfleet.analysis.run_folder import RunFolder
from skyfleet.errors import ConfigError
from skyfleet.storage.objects import join
from skyfleet.storage.store import read_bucket
from skyfleet.trajectories.archive import eval_path, train_path

TRAINING = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingEpisodes:
    steps: Mapping[str, Sequence[int]]
    """By evaluation set, and `training`; only what lacks a step."""
    place: str
    """The folder or address without them."""
    has_any: bool
    """Whether it has the episodes of other steps."""
    source: str | None
    """The address that should have them; None if it is the place, or the run has no such bucket."""

    def describe(self) -> str:
        """One sentence, without its final full stop."""
        listed = "; ".join(f"{name} {format_steps(steps)}" for name, steps in self.steps.items())
        if not self.has_any:
            return f"{self.place} has no episodes ({listed}); {self._describe_remedy()}"
        return (
            f"episodes are not in {self.place}: {listed}; what is computed from episodes covers the "
            f"other steps only; {self._describe_remedy()}"
        )

    def _describe_remedy(self) -> str:
        if self.source is not None:
            return f"those that were uploaded are in {self.source}: pass this address"
        return (
            "they stayed in the folder where these steps ran; trainer.trajectory_bucket keeps them"
        )


def find_missing_episodes(run: RunFolder) -> MissingEpisodes | None:
    """None if the folder has the episodes of every step and evaluation that it has numbers of."""
    if run.imported:
        return None
    trained = {int(row["step"]) for row in run.metrics()} - {0}
    steps = {TRAINING: [n for n in sorted(trained) if not train_path(run.trajectories, n).exists()]}
    for name, by_step in run.reports().items():
        steps[name] = [
            n for n in sorted(by_step) if not eval_path(run.trajectories, name, n).exists()
        ]
    lacking = {name: missing for name, missing in steps.items() if missing}
    if not lacking:
        return None
    bucket, source = run.config.trainer.trajectory_bucket, None
    if bucket is not None:
        source = join(read_bucket(bucket), "runs", run.config.trainer.run_name)
    return MissingEpisodes(
        steps=lacking,
        place=run.place,
        has_any=any(run.trajectories.rglob("step_*.jsonl.gz")),
        source=None if source == run.place else source,
    )


def reject_without_episodes(run: RunFolder) -> None:
    """ConfigError if the run has numbers of episodes and none of the episodes."""
    missing = find_missing_episodes(run)
    if missing is not None and not missing.has_any:
        raise ConfigError(missing.describe())
