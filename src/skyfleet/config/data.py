"""Data: the tasks to train on and the tasks to evaluate on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf

from pydantic import Field

from skyfleet.config.section import Section, StrList


class Data(Section):
    """A source is a file of tasks or a generated set, `world:github?split=train&count=400`."""

    train_data: StrList = Field([])
    """Sources of training tasks, concatenated."""
    val_data: StrList | dict[str, StrList] = Field([], union_mode="left_to_right")
    """Sources to evaluate on: one list, or one list per named set. The first set is the main one: it
    decides which checkpoint is best, and its metrics are `eval/...`."""
    test_data: dict[str, StrList] = Field({})
    """More named evaluation sets, as the tau-bench recipe spells them; their metrics are
    `test-{name}/...`."""
    retail_val_data: StrList = Field([])
    """The tau-bench recipe's extra evaluation set; its name is retail_val, its metrics are
    `eval-retail/...`."""
    held_out_envs: StrList = Field([])
    """Environments to exclude from training."""
    env_filter: StrList = Field([])
    """Keep only the tasks of these environments; empty keeps all."""
    env_weights: dict[str, float] = Field({})
    """Mixture weights by environment: each gets prompts of every batch in proportion to its weight, at
    least trainer.min_samples_per_env; an environment without one has weight 1. Empty follows the
    number of tasks."""
    max_train_tasks: int | None = Field(None, ge=1)
    """Train on at most so many tasks, chosen by trainer.seed: every environment keeps its share, and
    the subsets of one seed are nested. Evaluation sets are not affected."""
    quarantine: str | None = None
    """The file that `skyfleet tasks validate` wrote; its tasks are excluded from training. By default
    each quarantine.jsonl beside a task file or in the current folder, if there is one."""
    allow_quarantined: bool = False
    """Train on quarantined tasks too."""
    allow_unmanifested: bool = False
    """Train on files that `skyfleet tasks prepare` did not write, or that changed since."""
    allow_overlap: bool = False
    """Evaluate on tasks that are also trained on, to see whether a model can overfit them."""

    @property
    def eval_sets(self) -> dict[str, list[str]]:
        """Sources of every evaluation set by name, the main set first; a `val_data` list is `val`."""
        return {name: sources for name, sources in self._named_sets() if sources}

    @property
    def main_eval_set(self) -> str | None:
        """The name of the first evaluation set, which decides which checkpoint is best."""
        return next(iter(self.eval_sets), None)

    def find_problems(self) -> Iterator[str]:
        for env, weight in self.env_weights.items():
            if not 0 < weight < inf:
                yield (
                    f"data.env_weights.{env}={weight:g} is not a positive number; leave the "
                    "environment out with data.env_filter, or give it a weight above 0"
                )
        names = Counter(name for name, sources in self._named_sets() if sources)
        for name, count in names.items():
            if count > 1:
                yield f"data names {count} evaluation sets {name!r}; rename all but one"
            if "/" in name or name.startswith("."):
                yield (
                    f"data.val_data or data.test_data has a set named {name!r}, and files are named "
                    "after it; use a name without / that does not start with a dot"
                )

    def _named_sets(self) -> list[tuple[str, list[str]]]:
        main = self.val_data if isinstance(self.val_data, dict) else {"val": self.val_data}
        return [*main.items(), ("retail_val", self.retail_val_data), *self.test_data.items()]
