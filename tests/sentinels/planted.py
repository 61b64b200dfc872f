"""A tiny run that a known bug is planted in, and the findings of the sentinels."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fakes.moody_world import open_moody
from tests.fakes.small_runs import small_config

from skyfleet.envs import registry
from skyfleet.envs.env import EnvFactory
from skyfleet.trainer.assemble import assemble
from skyfleet.trainer.loop import finish_step, train_step
from skyfleet.trainer.run import Run

MODEL = (
    "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 1100, vocab_size: 400, "
    "initializer_range: 0.3}"
)
SETTINGS = (
    "data.train_data=[world:github?split=train&count=8]",
    f"trainer.policy.model_config_kwargs={MODEL}",
    "trainer.policy.optimizer_config.lr=1e-3",
    *("trainer.warm_start.steps=0", "trainer.epochs=1000", "trainer.max_training_steps=1000"),
    *("trainer.eval_interval=-1", "trainer.eval_before_train=false", "trainer.ckpt_interval=-1"),
    *("trainer.train_batch_size=4", "trainer.policy_mini_batch_size=2"),
    *("generator.max_turns=3", "generator.sampling_params.max_generate_length=8"),
    "trainer.algorithm.use_kl_loss=false",
    "trainer.sentinels.mode=warn",
)
KL = "trainer.algorithm.use_kl_loss=true"
IN_REWARD = "trainer.algorithm.use_kl_in_reward=true"

Plant = Callable[[Run, pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    name: str
    source: str
    """`SkyRL 13` is item 13 of the spec's list of SkyRL's traps, `Fleet 24` row 24 of Fleet's list of
    failures; `also` is known from elsewhere."""
    sentinel: str
    plant: Plant
    settings: tuple[str, ...] = ()
    open_env: EnvFactory = open_moody
    after: int = 0
    """Clean steps before it is planted."""
    shows_later: bool = False
    """It shows in the numbers of the step after the one it corrupts."""
    expected_text: str = ""
    """Part of the sentence of the finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFinding:
    step: int
    sentinel: str
    sentence: str


async def start_run(folder: Path, *settings: str, open_env: EnvFactory = open_moody) -> Run:
    """A run before its first step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.ENV_CLASSES, "world", lambda _: open_env)
        run = await assemble(small_config(folder, *SETTINGS, *settings))
    if KL in settings or IN_REWARD in settings:
        await finish_step(run)  # saves the reference
    run.state.logged_step = 0
    return run


async def run_steps(run: Run, steps: int) -> None:
    for _ in range(steps):
        await train_step(run, run.state.step + 1)
        await finish_step(run)


def read_findings(folder: Path) -> list[RecordedFinding]:
    path = folder / "sentinels.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [
        RecordedFinding(step=r["step"], sentinel=r["sentinel"], sentence=r["sentence"])
        for r in rows
    ]


async def run_with(bug: Bug, folder: Path) -> tuple[int, list[RecordedFinding]]:
    """The first step with the bug, and all findings."""
    run = await start_run(folder, *bug.settings, open_env=bug.open_env)
    try:
        with pytest.MonkeyPatch.context() as patch:
            await run_steps(run, bug.after)
            bug.plant(run, patch)
            await run_steps(run, 2 if bug.shows_later else 1)
    finally:
        run.log.close()
    return bug.after + 1, read_findings(folder)
