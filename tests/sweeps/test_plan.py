"""The plan of a sweep: configurations, data sizes and folders are checked before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.sweeps.scripted_runs import LR, plan_small, write_config

from skyfleet.config.keys import dump_yaml
from skyfleet.errors import ConfigError, TaskError
from skyfleet.sweeps.grid import build_grid
from skyfleet.sweeps.plan import plan_sweep
from skyfleet.sweeps.record import RunRecord, SweepRecord, check_folders
from skyfleet.trainer.tasks import load_training_tasks


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, monkeypatch)


def test_every_variant_runs_with_every_seed_in_a_folder_of_its_own() -> None:
    plan = plan_small(f"{LR}=1e-2,1e-3", "trainer.seed=5")
    assert [(run.name, run.seed) for run in plan.runs] == [
        ("small-lr-1e-2-seed5", 5),
        ("small-lr-1e-3-seed5", 5),
        ("small-lr-1e-2-seed6", 6),
        ("small-lr-1e-3-seed6", 6),
    ]
    second = plan.runs[1].config
    assert second.trainer.policy.optimizer_config.lr == 1e-3
    assert second.trainer.run_path == "runs/small-lr/small-lr-1e-3-seed5"
    assert second.trainer.ckpt_path == "runs/small-lr/small-lr-1e-3-seed5/checkpoints"


def test_data_sizes_are_nested_subsets_trained_for_the_same_number_of_steps() -> None:
    plan = plan_small(n_seeds=1, data_sizes="2,4")
    small, large = plan.runs
    assert [run.n_tasks for run in plan.runs] == [2, 4]
    keys = [{task.key for task in load_training_tasks(run.config)} for run in plan.runs]
    assert keys[0] < keys[1]
    assert small.total_steps == large.total_steps == 3
    few = plan_small("trainer.epochs=1", n_seeds=1, data_sizes="2,4").runs[0]
    assert few.total_steps == 3, "two tasks are an epoch of one step, so there are three epochs"


@pytest.mark.parametrize(
    ("arguments", "data_sizes", "sentence"),
    [
        (["trainer.lrr=1,2"], "", "trainer.lrr=1 is unknown; did you mean"),
        ([f"{LR}=fast,slow"], "", f"{LR}='fast': it takes"),
        ([], "2,5", "data size 5 (data.max_train_tasks): data.train_data has only 4 tasks; use at"),
        ([], "1,4", "trainer.train_batch_size=2 needs 2 different tasks, but there are 1"),
        (["trainer.eval_interval=-1"], "", "trainer.eval_interval=-1 evaluates no run at its end"),
        (["data.val_data=[]"], "", "data.val_data is empty, so the runs"),
    ],
)
def test_a_mistake_is_found_before_anything_runs(
    arguments: list[str], data_sizes: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_sweep("small.yaml", build_grid(arguments, n_seeds=2, data_sizes=data_sizes))
    assert sentence in str(caught.value)
    assert not Path("runs").exists()


def test_a_folder_with_other_settings_and_a_shared_checkpoint_folder_are_refused() -> None:
    plan = plan_small(name="mine")
    folder = plan.runs[1].folder
    folder.mkdir(parents=True)
    other = plan_small("trainer.policy.optimizer_config.weight_decay=0.5", name="mine").runs[1]
    (folder / "config.yaml").write_text(dump_yaml(other.config))
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match=r"weight_decay=0.5 .* give the sweep another --name"):
        check_folders(plan, SweepRecord())
    launched = SweepRecord(runs={plan.runs[1].name: RunRecord(state="launched")})
    check_folders(plan, launched)  # another machine has other paths and data
    text = Path("small.yaml").read_text()
    Path("small.yaml").write_text(text.replace("trainer:\n", "trainer:\n  ckpt_path: /x/c\n", 1))
    with pytest.raises(ConfigError, match=r"trainer.ckpt_path='/x/c' is the same for"):
        plan_small(name="other")


@pytest.mark.parametrize("name", ["1st", "a/b", "..", "a-"])
def test_a_name_must_also_be_the_name_of_a_cluster(name: str) -> None:
    with pytest.raises(ConfigError, match="start with a letter"):
        plan_small(name=name)


def test_training_files_of_another_machine_are_not_needed_to_launch() -> None:
    absent = ("data.train_data=[data/fleet/tool_use/train.parquet]", "trainer.epochs=1")
    grid = build_grid(absent, n_seeds=1, data_sizes="8,40")
    with pytest.raises(TaskError, match="no such file"):
        plan_sweep("small.yaml", grid)
    plan = plan_sweep("small.yaml", grid, allow_absent_data=True)
    assert [run.total_steps for run in plan.runs] == [3, 3]
    seeds = plan_sweep("small.yaml", build_grid(absent, n_seeds=2), allow_absent_data=True)
    assert [run.n_tasks for run in seeds.runs] == [None, None]
    assert plan.data_versions == {}
