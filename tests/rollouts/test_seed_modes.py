"""The effect of the turn settings on actions and on the loss mask."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.chat.small_tokenizer import small_tokenizer

from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.transcript import Completion
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Trajectory
from skyfleet.worlds.catalog import generate_world_tasks, open_world

TOKENIZER = small_tokenizer()
(STOP,) = TOKENIZER.encode("<|im_end|>")
LIMITS = Limits(max_turns=4, max_input_length=100_000, trajectory_timeout_seconds=5)


class Saying:
    """Returns its lines as tokens, `<|im_end|>` only where it stands in them."""

    policy_version = 0

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)
        self.prompts: list[list[int]] = []

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        self.prompts.append(list(token_ids))
        output = tuple(TOKENIZER.encode(self._lines.pop(0)))
        return Completion(
            token_ids=output, logprobs=(-0.5,) * len(output), finish="stop", policy_version=0
        )

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


async def played(engine: Saying, *, close_turns: bool = True) -> Trajectory:
    def start(task: Task, observation: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            observation,
            engine=engine,
            renderer=ChatMLRenderer(TOKENIZER, close_turns=close_turns),
            sampling=SamplingParams(),
            session=session,
        )

    (task,) = generate_world_tasks("github", split="train", count=1)
    return await run_episode(task, open_world, start, LIMITS)


@pytest.mark.parametrize(
    "thought", ["<think>Then I say <done>.</think>\n\nOne moment.", "<think>[done]"]
)
async def test_done_in_reasoning_does_not_end_the_episode(thought: str) -> None:
    trajectory = await played(Saying(f"{thought}<|im_end|>", "It is finished. <done><|im_end|>"))
    assert (trajectory.ending, len(trajectory.turns)) == (Ending.DONE, 2)
    (result,) = trajectory.turns[0].replies
    assert result.text.startswith("Error: no tool call.")


@pytest.mark.parametrize("close_turns", [True, False])
async def test_a_turn_ended_by_a_stop_string_gets_its_end_which_is_not_trained_on(
    close_turns: bool,
) -> None:
    engine = Saying("Hm.", "<done><|im_end|>")
    (transcript,) = (await played(engine, close_turns=close_turns)).transcripts
    end = len(engine.prompts[0]) + len(TOKENIZER.encode("Hm."))
    assert transcript.loss_mask[end - 1]
    assert (transcript.token_ids[end] == STOP) == close_turns
    assert not transcript.loss_mask[end]
    assert transcript.logprobs[end] == 0.0
    assert engine.prompts[1] == transcript.token_ids[: len(engine.prompts[1])]
