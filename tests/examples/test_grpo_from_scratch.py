"""The one-file GRPO example trains and prints its progress."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch
from examples.grpo_from_scratch import Vocabulary, demonstrate, grpo_advantages, main, read_action

from skyfleet.worlds.catalog import generate_world_tasks


async def test_the_sft_loss_falls_and_every_grpo_step_has_a_reward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses, rewards = await main(n_tasks=160, sft_steps=30, steps=2, tasks_per_step=2)
    assert fmean(losses[-5:]) < losses[0] / 4
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)
    assert "grpo   2  reward" in capsys.readouterr().out


async def test_a_demonstration_passes_and_its_tool_calls_are_action_tokens() -> None:
    vocabulary = Vocabulary()
    (task,) = generate_world_tasks("github", split="train", count=1)
    shown = await demonstrate(task, vocabulary)
    assert shown.reward == 1.0
    pairs = zip(shown.tokens, shown.loss_mask, strict=True)
    written = [token for token, is_action in pairs if is_action]
    calls, last = vocabulary.decode(written).strip().rsplit("\n", 1)
    assert last == "<done>"
    parsed = [read_action(line).tool_calls[0] for line in calls.splitlines()]
    assert [(call.name, call.arguments) for call in parsed] == [
        (call.name, call.arguments) for call in task.solution
    ]


def test_grpo_advantages_compare_the_attempts_at_one_task() -> None:
    advantages = grpo_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    assert advantages[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    assert advantages[1].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_a_line_that_is_no_call_is_plain_text() -> None:
    assert read_action('["get_issue",{"number":7}]').tool_calls[0].arguments == {"number": 7}
    for line in ("<done>", "[1,2]", '["get_issue"', '{"a":1}', ""):
        assert read_action(line).tool_calls == ()
        assert read_action(line).text == line
