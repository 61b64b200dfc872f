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
    hf_save_interval: int = -1
    print_example_interval: int = -1
    reference_interval: int = -1
    """An epoch, where the reference follows the policy."""

    def evaluates_at(self, step: int) -> bool:
        """Step 0 is before training. With an interval, the last step is always evaluated."""
        if step == 0:
            return self.eval_before_train
        return self.eval_interval > 0 and self._due(step, self.eval_interval)

    def saves_at(self, step: int) -> bool:
        return self._due(step, self.ckpt_interval)

    def exports_at(self, step: int) -> bool:
        """With an interval, the last step is always exported."""
        return step > 0 and self.hf_save_interval > 0 and self._due(step, self.hf_save_interval)

    def prints_example_at(self, step: int) -> bool:
        return self.print_example_interval > 0 and step % self.print_example_interval == 0

    def renews_reference_at(self, step: int) -> bool:
        """Not after the last step: nothing is compared with it any more."""
        within = 0 < step < self.total_steps and self.reference_interval > 0
        return within and step % self.reference_interval == 0

    def _due(self, step: int, interval: int) -> bool:
        return step == self.total_steps or (interval > 0 and step % interval == 0)
