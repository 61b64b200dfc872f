"""A whole training run handles turns and history as configured, with its sentinels on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.moody_world import MoodyWorld, open_moody
from tests.fakes.small_runs import rows, small_config

from skyfleet.chat.message import Message
from skyfleet.engines.factory import build_sampling_params
from skyfleet.envs import registry
from skyfleet.envs.env import Step
from skyfleet.envs.registry import env_factory
from skyfleet.rollouts.conversation import HISTORY_CUT
from skyfleet.rollouts.episode import run_episode
from skyfleet.tasks.task import Task
from skyfleet.trainer.limits import build_limits
from skyfleet.trainer.load_policy import load_policy_model
from skyfleet.trainer.policy_client import open_policy_client
from skyfleet.trainer.tasks import load_training_tasks
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.archive import read_trajectories, train_path
from skyfleet.worlds.catalog import get_world

SHORT = (
    *("trainer.max_training_steps=1", "trainer.eval_interval=-1", "trainer.ckpt_interval=-1"),
    *("trainer.eval_before_train=false", "trainer.warm_start.steps=0", "generator.max_turns=4"),
)
STATUS = "generator.inject_context_status=true"
WITH_TOOLS = "environment.enable_context_tools=true"
LONG_CONTEXT = (
    "generator.max_input_length=2000",
    "trainer.policy.model_config_kwargs.max_position_embeddings=2012",
)
ONE_MESSAGE = "generator.use_conversation_multi_turn=false"


class TruncatingWorld(MoodyWorld):
    """Asks after every step that all earlier turns be removed from the prompt."""

    async def step(self, action: Message) -> Step:
        return replace(await super().step(action), keep_recent_turns=0)


async def open_truncating(task: Task) -> TruncatingWorld:
    return TruncatingWorld(get_world(task.env_key), task)


@pytest.fixture(autouse=True)
def _moody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an environment whose rewards differ within a group, so every step changes the weights."""
    monkeypatch.setitem(registry.ENV_CLASSES, "world", lambda _: open_moody)


async def render_episode(folder: Path, *overrides: str) -> str:
    """The last transcript, as text, of the first episode with more than one turn."""
    config = small_config(folder, *SHORT, *overrides)
    tasks, open_env = load_training_tasks(config), env_factory(config)
    policy_model = await load_policy_model(config, tasks, open_env)
    async with open_policy_client(config, policy_model) as policy_client:
        for seed in range(100):
            policy = policy_client.agent(
                build_sampling_params(config.generator.sampling_params, seed=seed)
            )
            episode = await run_episode(tasks[0], open_env, policy, build_limits(config))
            if len(episode.turns) > 1:
                return policy_client.renderer.text(episode.transcripts[-1].token_ids)
    raise AssertionError("every episode had one turn")


async def test_each_turn_is_one_assistant_message_except_in_one_message_mode(
    tmp_path: Path,
) -> None:
    assert (await render_episode(tmp_path)).count("<|im_start|>assistant") > 1
    assert (await render_episode(tmp_path, ONE_MESSAGE)).count("<|im_start|>assistant") == 1


async def test_the_prompt_shows_limits_and_tools(tmp_path: Path) -> None:
    threshold = "generator.context_warning_threshold=0.01"
    text = await render_episode(tmp_path, STATUS, threshold, WITH_TOOLS, *LONG_CONTEXT)
    assert "search_history" in text.partition("<|im_start|>user")[0]
    assert "[Context warning: " in text
    assert " of 2,000 tokens used (" in text
    assert " 3 turns left; finish soon, or make room with manage_context]" in text
    plain = await render_episode(tmp_path)
    assert "[Context" not in plain
    assert "search_history" not in plain


@pytest.mark.parametrize("mode", [(), (ONE_MESSAGE,), ("generator.step_wise_trajectories=true",)])
async def test_a_run_that_truncates_history_trains_on_every_transcript(
    tmp_path: Path, mode: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.ENV_CLASSES, "world", lambda _: open_truncating)
    await run_training(small_config(tmp_path, *SHORT, *LONG_CONTEXT, STATUS, *mode))
    row = rows(tmp_path)[-1]
    assert row["policy/grad_norm"] > 0
    episodes = list(read_trajectories(train_path(tmp_path / "trajectories", 1)))
    transcripts = [t for episode in episodes for t in episode.transcripts if any(t.loss_mask)]
    assert sum(t.reason == HISTORY_CUT for t in transcripts) > 2
    samples = sum(len(e.turns) for e in episodes) if "step_wise" in str(mode) else len(transcripts)
    assert row["loss/num_samples"] == samples
