"""The one-file example trains and prints its rewards."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch
from examples.grpo_from_scratch import Vocabulary, demonstrate, grpo_advantages, main, read_action

from skyfleet.worlds.catalog import world_tasks


async def test_imitation_loss_falls_and_every_step_has_a_reward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses, rewards = await main(n_tasks=160, imitation_steps=30, steps=2, tasks_per_step=2)
    assert fmean(losses[-5:]) < losses[0] / 4
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)
    assert "reinforce   2  reward" in capsys.readouterr().out


async def test_a_demonstration_passes_and_its_action_tokens_are_the_calls() -> None:
    vocabulary = Vocabulary()
    (task,) = world_tasks("github", split="train", count=1)
    shown = await demonstrate(task, vocabulary)
    assert shown.reward == 1.0
    written = [token for token, chosen in zip(shown.tokens, shown.chosen, strict=True) if chosen]
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
