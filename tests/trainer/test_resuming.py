"""A resumed run gives the same metrics, episodes and weights as an uninterrupted one."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from tests.fakes import copied_engine
from tests.fakes.copied_engine import VLLM, stand_for_vllm
from tests.fakes.moody_world import open_moody
from tests.fakes.small_runs import rows, small_config
from tests.trainer.interrupting import interrupt_training

from skyfleet.algorithms.sample import Sample
from skyfleet.checkpoints.checkpoint import FileRecord
from skyfleet.checkpoints.resume import find_checkpoint
from skyfleet.config.keys import known_keys
from skyfleet.envs import registry
from skyfleet.errors import CheckpointError, ConfigError, ModelError
from skyfleet.learner.learner import StepReport
from skyfleet.learner.single_device import SingleDeviceLearner
from skyfleet.trainer.resuming import KEYS_MUTABLE_ON_RESUME, check_startable
from skyfleet.trainer.run import TrainerState
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.index import list_file_entries

WARM_START = "skyfleet.learner.single_device:SingleDeviceLearner.sft_step"
ROLLOUT = "skyfleet.trainer.rollouts:collect"
EVALUATION = "skyfleet.evaluation.evaluate:collect"
LEARNING = "skyfleet.learner.single_device:SingleDeviceLearner.step"
PUSH, SLEEP, WAKE = (
    f"tests.fakes.copied_engine:{name}" for name in ("CopySync.push", "Copied.sleep", "Copied.wake")
)


@pytest.fixture(autouse=True, scope="module")
def _moody() -> Iterator[None]:
    """Use an environment whose rewards differ within a group, so every step changes the weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.ENV_CLASSES, "world", lambda _: open_moody)
        yield


@pytest.fixture(scope="module")
def straight(_moody: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight")
    asyncio.run(run_training(small_config(folder)))
    return folder


def metrics(folder: Path) -> str:
    return (folder / "metrics.jsonl").read_text()


def episodes(folder: Path) -> dict[str, int]:
    """The number of attempts in each trajectory file."""
    root = folder / "trajectories"
    return {
        str(path.relative_to(root)): len(list_file_entries(path))
        for path in sorted(root.rglob("*.jsonl.gz"))
    }


def weights(folder: Path, step: int) -> bytes:
    (file,) = (folder / f"checkpoints/global_step_{step}/policy").glob("*.safetensors")
    return file.read_bytes()


async def test_the_seed_decides_every_byte_of_the_metrics(straight: Path, tmp_path: Path) -> None:
    await run_training(small_config(tmp_path / "same"))
    await run_training(small_config(tmp_path / "other", "trainer.seed=43"))
    assert metrics(tmp_path / "same") == metrics(straight) != metrics(tmp_path / "other")


def exhaustive(*place: object) -> ParameterSet:
    """A place that differs from a default one only in its number."""
    return pytest.param(*place, marks=pytest.mark.exhaustive)


# Those in the first rollouts and evaluations are also in
# test_a_run_can_be_interrupted_repeatedly.
@pytest.mark.parametrize(
    ("within", "call", "loops"),
    [
        exhaustive(WARM_START, 1, 0),
        exhaustive(WARM_START, 2, 1),
        exhaustive(WARM_START, 3, 0),
        (WARM_START, 3, 1),  # the last
        exhaustive(ROLLOUT, 1, 3),
        (ROLLOUT, 2, 12),
        exhaustive(ROLLOUT, 3, 3),
        exhaustive(EVALUATION, 1, 3),  # before training, the first set
        exhaustive(EVALUATION, 2, 3),  # before training, when the first set is done
        exhaustive(EVALUATION, 3, 3),  # after step 2
        (EVALUATION, 4, 3),  # after step 2, when the first set is done
        (EVALUATION, 6, 3),  # after the last step
    ],
)
async def test_a_resumed_run_matches_an_uninterrupted_one(
    straight: Path, tmp_path: Path, within: str, call: int, loops: int
) -> None:
    config = small_config(tmp_path)
    await interrupt_training(config, within, call=call, loops=loops)
    outcome = await run_training(config)
    assert metrics(tmp_path) == metrics(straight)
    assert episodes(tmp_path) == episodes(straight)
    assert outcome.table == (straight / "results.md").read_text()


@pytest.fixture(scope="module")
def copied(_moody: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An uninterrupted run whose engine copies the weights, as all runs do while this is open."""
    folder = tmp_path_factory.mktemp("copied")
    with pytest.MonkeyPatch.context() as patch:
        stand_for_vllm(patch)
        asyncio.run(run_training(small_config(folder, *VLLM)))
        yield folder


@pytest.mark.parametrize(
    ("within", "call", "loops", "expected_step"),
    [
        (PUSH, 1, 1, 0),  # after the warm start
        exhaustive(WAKE, 1, 1, 0),
        (SLEEP, 3, 1, 1),
        (LEARNING, 2, 0, 2),
        (PUSH, 3, 2, 2),
        exhaustive(PUSH, 4, 1, 3),
        exhaustive(WAKE, 3, 1, 2),
        (WAKE, 4, 1, 3),  # after the last step
    ],
)
async def test_updated_weights_are_checkpointed_even_if_no_engine_received_them(
    copied: Path, tmp_path: Path, within: str, call: int, loops: int, expected_step: int
) -> None:
    config = small_config(tmp_path, *VLLM)
    await interrupt_training(config, within, call=call, loops=loops)
    assert copied_engine.happened[-1] == "close"
    saved = find_checkpoint(tmp_path / "checkpoints", "latest")
    assert saved is not None
    assert saved.step == expected_step
    await run_training(config)
    assert metrics(tmp_path) == metrics(copied)
    assert weights(tmp_path, 3) == weights(copied, 3)


@pytest.mark.parametrize(("method", "expected_step"), [("sft_step", 0), ("step", 1)])
async def test_ctrl_c_during_an_update_takes_effect_before_the_engine_is_called(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, expected_step: int
) -> None:
    learn = getattr(SingleDeviceLearner, method)
    config = small_config(tmp_path, *VLLM, f"trainer.warm_start.steps={1 - expected_step}")

    async def cancel_and_learn(self: SingleDeviceLearner, samples: Sequence[Sample]) -> StepReport:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        report: StepReport = await learn(self, samples)
        return report

    async def raise_engine_dead(*_: object) -> int:
        raise ModelError("EngineDeadError")

    with monkeypatch.context() as patch:
        patch.setattr(SingleDeviceLearner, method, cancel_and_learn)
        patch.setattr(copied_engine.CopySync, "push", raise_engine_dead)
        with pytest.raises(asyncio.CancelledError):
            await run_training(config)
    saved = find_checkpoint(tmp_path / "checkpoints", "latest")
    assert saved is not None
    assert saved.step == expected_step


async def test_a_run_can_be_interrupted_repeatedly(straight: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path)
    await interrupt_training(config, WARM_START, call=2, loops=0)
    await interrupt_training(config, EVALUATION, call=1, loops=3)
    await interrupt_training(config, ROLLOUT, call=1, loops=3)
    await interrupt_training(config, ROLLOUT, call=2, loops=3)
    await interrupt_training(config, EVALUATION, call=2, loops=3)
    await run_training(config)
    assert metrics(tmp_path) == metrics(straight)


def test_metrics_of_a_logged_row_are_not_pending() -> None:
    """Checkpoints of earlier versions have them."""
    kept = {"timing/save_checkpoints": 1.0, "timing/save_hf_model": 2.0}
    logged = {"timing/generate": 3.0, "reward/avg_raw_reward": 0.5}
    for logged_step, expected in ((1, logged | kept), (2, kept)):
        state = TrainerState(step=2, logged_step=logged_step, pending_metrics=logged | kept)
        assert state.take_pending_metrics() == expected
        assert state.pending_metrics == {}


async def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path, "trainer.max_training_steps=1"))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1]
    await run_training(small_config(tmp_path, "trainer.max_training_steps=2"))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("has_file", [True, False])
async def test_a_changed_configuration_is_not_resumed_with_or_without_its_file(
    straight: Path, tmp_path: Path, has_file: bool
) -> None:
    folder = straight if has_file else tmp_path / "copy"
    if not has_file:
        shutil.copytree(straight, folder)
        (folder / "config.yaml").unlink()
        assert check_startable(small_config(folder, "trainer.max_training_steps=4")) is not None
    changed = small_config(folder, "trainer.policy.optimizer_config.lr=0.5")
    with pytest.raises(
        ConfigError, match=r"started with trainer.policy.optimizer_config.lr=0.01 and"
    ):
        await run_training(changed)
    if not has_file:
        forget_state(folder, "config")  # as in checkpoints of earlier versions
        assert check_startable(changed) is not None


def forget_state(folder: Path, *names: str) -> None:
    """Remove fields from the trainer's state in the newest checkpoint."""
    saved = find_checkpoint(folder / "checkpoints", "latest")
    assert saved is not None
    path = saved.folder / "trainer" / "state.json"
    state = {key: value for key, value in json.loads(path.read_text()).items() if key not in names}
    path.write_text(json.dumps(state))
    files = {**saved.manifest.files, "trainer/state.json": FileRecord.of(path)}
    manifest = saved.manifest.model_copy(update={"files": files})
    (saved.folder / "manifest.json").write_text(manifest.model_dump_json())


async def test_two_runs_do_not_share_a_folder(straight: Path) -> None:
    with pytest.raises(ConfigError, match="already holds a run"):
        await run_training(small_config(straight, "trainer.resume_mode=none"))


async def test_a_run_killed_before_its_first_row_starts_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    await run_training(small_config(tmp_path, "trainer.max_training_steps=1"))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1]


async def test_resuming_before_a_later_checkpoint_is_refused(
    straight: Path, tmp_path: Path
) -> None:
    """Otherwise the next resume would continue from the abandoned later checkpoint."""
    earlier = straight / "checkpoints" / "global_step_2"
    overrides = ("trainer.resume_mode=from_path", f"trainer.resume_path={earlier}")
    with pytest.raises(ConfigError, match="global_step_3 is later"):
        await run_training(small_config(straight, *overrides))


async def test_resuming_in_another_folder_without_the_reference_is_refused(
    straight: Path, tmp_path: Path
) -> None:
    earlier = straight / "checkpoints" / "global_step_2"
    overrides = ("trainer.resume_mode=from_path", f"trainer.resume_path={earlier}")
    with pytest.raises(CheckpointError, match="use_kl_loss"):
        await run_training(small_config(tmp_path / "elsewhere", *overrides))


def test_the_docs_list_the_keys_that_may_change_on_resume() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run_folder.md").read_text()
    sentence = page.partition("only these keys may change: ")[2].partition(". ")[0]
    named, section = set(), ""
    for name in re.findall(r"`([\w.]+)`", sentence):
        given, dot, key = name.partition(".")
        section, key = (
            (given, key)
            if dot and given in ("trainer", "generator", "environment")
            else (section, name)
        )
        named.add(f"{section}.{key}")
    assert named == set(KEYS_MUTABLE_ON_RESUME)
    assert named <= known_keys().keys()
