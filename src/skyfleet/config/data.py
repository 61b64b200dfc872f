"""Data: which tasks are trained on and which are only measured."""

from __future__ import annotations

from pydantic import Field

from skyfleet.config.section import Section, StrList


class Data(Section):
    """A source is a file of tasks or a generated set, `world:github?split=train&count=400`."""

    train_data: StrList = Field([])
    """Sources of training tasks, all joined."""
    val_data: StrList | dict[str, StrList] = Field([], union_mode="left_to_right")
    """Sources to evaluate on: one list, or one list for each named set."""
    test_data: dict[str, StrList] = Field({})
    """More named sets to evaluate on, as the tau-bench recipe spells them."""
    retail_val_data: StrList = Field([])
    """The tau-bench recipe's extra set; evaluated under the name retail_val."""
    held_out_envs: StrList = Field([])
    """Environments that are never trained on."""
    env_filter: StrList = Field([])
    """Keep only the tasks of these environments; empty keeps all."""
    quarantine: str | None = None
    """The file that `skyfleet tasks validate` wrote; its tasks are not trained on. Unset, it is
    each quarantine.jsonl beside a task file or in the current folder, if there is one."""
    allow_quarantined: bool = False
    """Train on them all the same."""
    allow_unmanifested: bool = False
    """Train on files that `skyfleet tasks prepare` did not write, or that changed since."""
    allow_overlap: bool = False
    """Evaluate on tasks that are trained on, to see whether a model can overfit them."""

    @property
    def eval_sets(self) -> dict[str, list[str]]:
        """Every evaluation set by name; a plain `val_data` list is called val."""
        named = self.val_data if isinstance(self.val_data, dict) else {"val": self.val_data}
        sets = {**named, "retail_val": self.retail_val_data, **self.test_data}
        return {name: sources for name, sources in sets.items() if sources}
