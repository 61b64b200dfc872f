"""`data.max_train_tasks`: a run trains on a subset, and is evaluated on the whole set."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.small_runs import small_config

from skyfleet.config.root import RunConfig
from skyfleet.trainer.tasks import RunTasks, load_run_tasks, load_training_tasks

SOURCES = "data.train_data=[world:github?split=train&count=12, world:booking?split=train&count=6]"


def load(folder: Path, *overrides: str) -> tuple[RunConfig, RunTasks]:
    config = small_config(folder, SOURCES, *overrides)
    return config, load_run_tasks(config)


def test_the_evaluation_sets_and_larger_limits_are_not_affected(tmp_path: Path) -> None:
    _, everything = load(tmp_path)
    _, six = load(tmp_path, "data.max_train_tasks=6")
    _, more = load(tmp_path, "data.max_train_tasks=19")
    assert len(everything.train) == 18
    assert more.train == everything.train
    assert sorted(task.env_key for task in six.train) == ["booking"] * 2 + ["github"] * 4
    assert six.eval_sets == everything.eval_sets


def test_the_seed_of_the_run_chooses_the_tasks_also_of_tasks_given_as_objects(
    tmp_path: Path,
) -> None:
    _, everything = load(tmp_path)
    first, chosen = load(tmp_path, "data.max_train_tasks=6", "trainer.seed=1")
    _, other = load(tmp_path, "data.max_train_tasks=6", "trainer.seed=2")
    _, larger = load(tmp_path, "data.max_train_tasks=12", "trainer.seed=1")
    keys = {task.key for task in chosen.train}
    assert keys != {task.key for task in other.train}
    assert keys < {task.key for task in larger.train}
    assert load_training_tasks(first) == chosen.train
    assert load_run_tasks(first, train_tasks=everything.train).train == chosen.train
