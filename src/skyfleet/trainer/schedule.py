"""Schedule: when things happen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """In steps."""

    total_steps: int
    warm_start_steps: int = 0
    eval_before_train: bool = True
    eval_interval: int = -1
    ckpt_interval: int = -1
    max_ckpts_to_keep: int = -1

    def evaluates_at(self, step: int) -> bool:
        """Step 0 is before training. With an interval, the last step is always evaluated."""
        if step == 0:
            return self.eval_before_train
        return self.eval_interval > 0 and self._due(step, self.eval_interval)

    def saves_at(self, step: int) -> bool:
        return self._due(step, self.ckpt_interval)

    def _due(self, step: int, interval: int) -> bool:
        return step == self.total_steps or (interval > 0 and step % interval == 0)
