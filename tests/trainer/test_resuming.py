"""A run that is interrupted and resumed is the run that was not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.moody_world import open_moody
from tests.fakes.small_runs import rows, small_config
from tests.trainer.interrupting import interrupted

from skyfleet.envs import registry
from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.trainer.session import run_training
from skyfleet.trajectories.index import entries_of

WARM_START = "skyfleet.learner.single:SingleLearner.imitate"
ROLLOUT = "skyfleet.trainer.loop:collect"
EVALUATION = "skyfleet.evaluation.evaluate:collect"


@pytest.fixture(autouse=True, scope="module")
def _moody() -> Iterator[None]:
    """Rewards that differ inside a group, so that every step moves the weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.ENV_CLASSES, "world", lambda _: open_moody)
        yield


@pytest.fixture(scope="module")
def straight(_moody: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    asyncio.run(run_training(small_config(folder)))
    return folder


def metrics(folder: Path) -> str:
    return (folder / "metrics.jsonl").read_text()


def episodes(folder: Path) -> dict[str, int]:
    """How many attempts each file of trajectories holds."""
    root = folder / "trajectories"
    return {
        str(path.relative_to(root)): len(entries_of(path))
        for path in sorted(root.rglob("*.jsonl.gz"))
    }


async def test_the_seed_decides_every_byte_of_the_metrics(straight: Path, tmp_path: Path) -> None:
    await run_training(small_config(tmp_path / "same"))
    await run_training(small_config(tmp_path / "other", "trainer.seed=43"))
    assert metrics(tmp_path / "same") == metrics(straight) != metrics(tmp_path / "other")


@pytest.mark.parametrize(
    ("within", "call", "loops"),
    [
        (WARM_START, 1, 0),
        (WARM_START, 2, 1),
        (WARM_START, 3, 0),  # the last
        (WARM_START, 3, 1),
        (ROLLOUT, 1, 3),
        (ROLLOUT, 2, 12),
        (ROLLOUT, 3, 3),
        (EVALUATION, 1, 3),  # before training, the first set
        (EVALUATION, 2, 3),  # before training, when the first set is done
        (EVALUATION, 3, 3),  # after step 2
        (EVALUATION, 4, 3),
        (EVALUATION, 6, 3),  # after the last step
    ],
)
async def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    straight: Path, tmp_path: Path, within: str, call: int, loops: int
) -> None:
    config = small_config(tmp_path)
    await interrupted(config, within, call=call, loops=loops)
    table = await run_training(config)
    assert metrics(tmp_path) == metrics(straight)
    assert episodes(tmp_path) == episodes(straight)
    assert table == (straight / "results.md").read_text()


async def test_a_run_may_be_interrupted_again_and_again(straight: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path)
    await interrupted(config, WARM_START, call=2, loops=0)
    await interrupted(config, EVALUATION, call=1, loops=3)
    await interrupted(config, ROLLOUT, call=1, loops=3)
    await interrupted(config, ROLLOUT, call=2, loops=3)
    await interrupted(config, EVALUATION, call=2, loops=3)
    await run_training(config)
    assert metrics(tmp_path) == metrics(straight)


async def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path, "trainer.max_training_steps=2"))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]
    await run_training(small_config(tmp_path))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]


async def test_a_changed_configuration_is_not_resumed(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path))
    changed = small_config(tmp_path, "trainer.policy.optimizer_config.lr=0.5")
    with pytest.raises(
        ConfigError, match=r"begun with trainer.policy.optimizer_config.lr=0.01 and"
    ):
        await run_training(changed)


async def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path))
    with pytest.raises(ConfigError, match="holds a run already"):
        await run_training(small_config(tmp_path, "trainer.resume_mode=none"))


async def test_a_run_that_died_before_its_first_row_begins_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    await run_training(small_config(tmp_path))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]


async def test_going_back_behind_a_later_checkpoint_is_refused(
    straight: Path, tmp_path: Path
) -> None:
    """Else the next resume would go on from a future the run had left."""
    earlier = straight / "checkpoints" / "global_step_2"
    overrides = ("trainer.resume_mode=from_path", f"trainer.resume_path={earlier}")
    with pytest.raises(ConfigError, match="global_step_3 is later"):
        await run_training(small_config(straight, *overrides))


async def test_a_run_moved_elsewhere_without_its_reference_is_refused(
    straight: Path, tmp_path: Path
) -> None:
    earlier = straight / "checkpoints" / "global_step_2"
    overrides = ("trainer.resume_mode=from_path", f"trainer.resume_path={earlier}")
    with pytest.raises(CheckpointError, match="use_kl_loss"):
        await run_training(small_config(tmp_path / "elsewhere", *overrides))
