"""A run that cannot work fails with a one-line error before it spends anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.fakes.small_runs import TRAIN, small_config

from skyfleet.curation.quarantine import Quarantine, write_quarantine
from skyfleet.curation.verdict import Reason, Verdict
from skyfleet.errors import CheckpointError, ConfigError, ModelError, SkyfleetError, TaskError
from skyfleet.storage.local import discard
from skyfleet.tasks.loading import write_tasks
from skyfleet.tasks.task import RecordedCall
from skyfleet.trainer.tasks import check_disjoint, load_training_tasks
from skyfleet.trainer.training_run import run_training
from skyfleet.worlds.catalog import generate_world_tasks, tasks_from_source


async def run_and_catch(folder: Path, *overrides: str) -> SkyfleetError:
    before = files(folder)
    with pytest.raises(SkyfleetError) as caught:
        await run_training(small_config(folder, *overrides))
    assert "\n" not in str(caught.value)
    assert files(folder) == before
    return caught.value


def files(folder: Path) -> dict[Path, bytes] | None:
    """The content of every file; None if the folder does not exist."""
    if not folder.exists():
        return None
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_held_out_env_is_never_trained_on(tmp_path: Path) -> None:
    error = await run_and_catch(tmp_path, "data.train_data=world:outlook?split=all&count=4")
    assert isinstance(error, ConfigError)
    assert str(error).startswith(
        "data.train_data holds tasks of 'outlook', which data.held_out_envs"
    )


def test_a_mini_batch_larger_than_the_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy_mini_batch_size=4 is larger than"):
        small_config(tmp_path, "trainer.policy_mini_batch_size=4")


@pytest.mark.parametrize("content", ["", "[]"])
async def test_an_empty_task_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tasks.json"
    file.write_text(content)
    error = await run_and_catch(tmp_path / "run", f"data.train_data=[{file}]")
    assert str(file) in str(error) or "data.train_data is empty" in str(error)


async def test_no_training_data_is_refused(tmp_path: Path) -> None:
    error = await run_and_catch(tmp_path, "data.train_data=[]")
    assert str(error).startswith("data.train_data is empty: name task files or worlds")


async def test_a_missing_model_folder_is_refused(tmp_path: Path) -> None:
    error = await run_and_catch(tmp_path, f"trainer.policy.model.path={tmp_path}/no_model")
    assert isinstance(error, ModelError)
    assert "is not a model folder" in str(error)


@pytest.mark.parametrize("content", [None, "{}"])
async def test_a_missing_reference_is_refused_by_its_own_key(
    tmp_path: Path, content: str | None
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    if content is not None:
        (other / "config.json").write_text(content)
    error = await run_and_catch(tmp_path / "run", f"trainer.ref.model.path={other}")
    assert isinstance(error, ModelError)
    assert str(error).startswith(f"trainer.ref.model.path='{other}'")
    assert "trainer.policy" not in str(error)


async def test_a_batch_larger_than_the_task_set_is_refused(tmp_path: Path) -> None:
    error = await run_and_catch(
        tmp_path, "trainer.train_batch_size=5", "trainer.policy_mini_batch_size=5"
    )
    assert str(error).startswith("trainer.train_batch_size=5 needs 5 different tasks")


@pytest.mark.parametrize(
    ("solution", "sentence"),
    [
        ((RecordedCall(name="no_such_tool"),), "its reference solution does not pass (done)"),
        ((), "it has no reference solution; fix or remove the task"),
    ],
)
async def test_a_failing_reference_solution_is_refused_before_the_warm_start(
    tmp_path: Path, solution: tuple[RecordedCall, ...], sentence: str
) -> None:
    tasks = [
        task.model_copy(update={"solution": solution})
        for task in generate_world_tasks("github", split="train", count=4)
    ]
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([task.model_dump() for task in tasks]))
    error = await run_and_catch(
        tmp_path / "run", f"data.train_data=[{file}]", "data.allow_unmanifested=true"
    )
    assert isinstance(error, TaskError)
    assert sentence in str(error)


async def test_a_task_file_without_a_manifest_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    write_tasks(file, generate_world_tasks("github", split="train", count=4))
    error = await run_and_catch(tmp_path / "run", f"data.train_data=[{file}]")
    assert "has no manifest.json beside it" in str(error)
    assert "data.allow_unmanifested=true" in str(error)


async def test_a_task_in_quarantine_is_refused(tmp_path: Path) -> None:
    task = tasks_from_source(TRAIN)[0]
    verdict = Verdict.on(task, (Reason.VACUOUS, "seen"))
    file = tmp_path / "quarantine.jsonl"
    write_quarantine(file, Quarantine().updated([verdict]))
    error = await run_and_catch(tmp_path / "run", f"data.quarantine={file}")
    assert f"1 tasks in quarantine ({file}), such as {task.key!r} (vacuous)" in str(error)


async def test_a_quarantine_file_in_the_current_folder_is_applied_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = tasks_from_source(TRAIN)[0]
    verdict = Verdict.on(task, (Reason.VACUOUS, "seen"))
    write_quarantine("quarantine.jsonl", Quarantine().updated([verdict]))
    error = await run_and_catch(tmp_path / "run")
    assert "1 tasks in quarantine (quarantine.jsonl), such as" in str(error)
    config = small_config(tmp_path / "run", "data.allow_quarantined=true")
    assert task in load_training_tasks(config)


async def test_a_filter_that_names_an_unknown_environment_is_refused(tmp_path: Path) -> None:
    error = await run_and_catch(tmp_path, "data.env_filter=[gitlab]")
    assert str(error).startswith("data.env_filter='gitlab'")


async def test_a_demonstration_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    error = await run_and_catch(
        tmp_path, "generator.max_input_length=40", "trainer.max_prompt_length=40"
    )
    assert "its reference solution does not pass (context_full)" in str(error)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.logger=[wandb]", "wandb is not installed; it comes with the extra"),
        (
            "trainer.sentinels.modes.no_such=stop",
            "trainer.sentinels.modes.no_such is not a sentinel",
        ),
        ("trainer.algorithm.policy_loss_type=no_such:loss", "no_such"),
    ],
)
async def test_a_refused_run_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, sentence: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    folder = tmp_path / "run"
    assert sentence in str(await run_and_catch(folder, "trainer.warm_start.steps=0", override))
    assert not folder.exists()


@pytest.mark.parametrize("key", ["policy_loss_type", "advantage_estimator"])
async def test_a_function_with_another_signature_is_refused_before_tasks_are_loaded(
    tmp_path: Path, key: str
) -> None:
    progress: list[str] = []
    config = small_config(tmp_path, f"trainer.algorithm.{key}=bisect:bisect")
    with pytest.raises(ConfigError, match=f"{key}='bisect:bisect' is called with .* missing a"):
        await run_training(config, on_progress=progress.append)
    assert progress == ["loading torch and transformers"]


async def test_a_refused_resume_leaves_the_run_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    short = ("data.val_data=[]", "trainer.max_training_steps=2", "trainer.ckpt_interval=1")
    await run_training(small_config(folder, *short))
    saved = folder / "checkpoints" / "global_step_1"
    # An accepted resume truncates the rows after step 1 and rewrites the configuration.
    discard(folder / "checkpoints" / "global_step_2")
    longer = (*short, "trainer.max_training_steps=3")
    error = await run_and_catch(folder, *longer, "trainer.sentinels.modes.no_such=stop")
    assert "trainer.sentinels.modes.no_such is not a sentinel" in str(error)
    weights = saved / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    error = await run_and_catch(folder, *longer, "trainer.resume_strict=true")
    assert isinstance(error, CheckpointError)
    assert "has changed since it was saved" in str(error)


async def test_unsupported_values_are_reported_at_once(tmp_path: Path) -> None:
    error = await run_and_catch(tmp_path, "trainer.strategy=megatron")
    assert str(error).startswith("trainer.strategy='megatron' does not run in this version")


def test_evaluation_tasks_may_overlap_training_tasks_only_if_allowed() -> None:
    train = generate_world_tasks("github", split="all", count=60)
    unseen = generate_world_tasks("github", split="unseen_tasks", count=30)
    n_shared = len({task.key for task in train} & {task.key for task in unseen})
    with pytest.raises(ConfigError) as caught:
        check_disjoint(train, {"far": [], "near": unseen}, allow=False)
    assert n_shared > 0
    assert str(caught.value).startswith(
        f"data.val_data.near holds {n_shared} of its 30 tasks, such as 'github-"
    )
    assert "or set data.allow_overlap=true" in str(caught.value)
    check_disjoint(train, {"near": unseen}, allow=True)
    check_disjoint(
        generate_world_tasks("github", split="train", count=60), {"near": unseen}, allow=False
    )
    repeated = train[0].model_copy(update={"key": "other", "prompt": train[0].prompt.upper()})
    with pytest.raises(ConfigError, match=r"data.val_data.val holds 1 of its 1 tasks.*'other'"):
        check_disjoint(train, {"val": [repeated]}, allow=False)
