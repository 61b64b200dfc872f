"""In a thousand episodes with cuts, warnings and stops each sampled token is trained on exactly once.

The transcripts are compared with what the engine received and returned, in both turn modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from random import Random

import pytest
from tests.chat.small_tokenizer import small_tokenizer

from skyfleet.algorithms.advantages import split_turns
from skyfleet.algorithms.credit_assignment import assign_credit
from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.message import Message
from skyfleet.chat.tokenizer import encode_text
from skyfleet.chat.transcript import Completion
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.context_env import ContextEnv
from skyfleet.envs.env import Observation, Step
from skyfleet.rollouts.conversation import HISTORY_CUT, ContextStatus, TokenConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.one_message import STOP_REMOVED, OneMessageConversation
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Group, Trajectory

EPISODES = 500
"""In each of the two modes."""


class Quick:
    """The small tokenizer; most of what it is given is the same few words again and again."""

    def __init__(self) -> None:
        self.encode = cache(small_tokenizer().encode)
        self.decode = small_tokenizer().decode


TOKENIZER = Quick()
RENDERER = ChatMLRenderer(TOKENIZER)
(STOP,) = TOKENIZER.encode("<|im_end|>")
CALLS = [
    TOKENIZER.encode(
        f'<tool_call>\n{{"name": "manage_context", "arguments": {{"keep_recent_turns": {n}}}}}\n'
        "</tool_call>"
    )
    for n in range(3)
]
LIMITS = Limits(max_turns=6, max_input_length=2500, trajectory_timeout_seconds=0)
STATUS = ContextStatus(max_input_length=2500, max_turns=6, warning_threshold=0.3)

Exchange = tuple[list[int], Completion]


class Babbling:
    """Random tokens, with a call to cut now and then, and with or without a stop."""

    policy_version = 0

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.output: list[Exchange] = []

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        rng = self._rng
        words = [rng.randrange(3, 200) for _ in range(rng.randrange(12))]
        words += rng.choice(CALLS) if rng.random() < 0.4 else []
        words += [STOP] if rng.random() < 0.5 else []
        completion = Completion(
            token_ids=tuple(words),
            logprobs=tuple(-rng.random() for _ in words),
            finish="length" if rng.random() < 0.02 else "stop",
            policy_version=len(self.output),
        )
        self.output.append((list(token_ids), completion))
        return completion

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Whimsical:
    def __init__(self, rng: Random) -> None:
        self._rng = rng

    async def reset(self) -> Observation:
        return Observation(messages=(Message(role="user", content="the task"),))

    async def step(self, action: Message) -> Step:
        rng = self._rng
        text = rng.choice(["", "no", "<|im_end|> he said", "long " * rng.randrange(40)])
        role = rng.choice(["user", "tool"])
        messages = (Message(role=role, content=text),) * rng.randrange(3)  # type: ignore[arg-type]
        return Step(messages=messages, done=rng.random() < 0.05)

    async def grade(self) -> Grade:
        return Grade(reward=self._rng.random(), success=False)

    async def close(self) -> None: ...


async def played(rng: Random, engine: Babbling, *, one_message: bool) -> Trajectory:
    conversation_class = (
        partial(OneMessageConversation, encode=partial(encode_text, TOKENIZER))
        if one_message
        else TokenConversation
    )
    status = STATUS if rng.random() < 0.5 else None

    def start(task: Task, observation: Observation, session: str) -> TokenConversation:
        return conversation_class(
            observation,
            engine=engine,
            renderer=RENDERER,
            sampling=SamplingParams(),
            session=session,
            status=status,
        )

    async def open_env(task: Task) -> ContextEnv:
        return ContextEnv(Whimsical(rng), page_characters=100)

    task = Task(key="t", env_key="e", prompt="the task")
    return await run_episode(task, open_env, start, LIMITS)


def check(trajectory: Trajectory, output: Sequence[Exchange]) -> None:
    """Every completion is in one transcript, after the prompt it was sampled from, and alone there."""
    left = list(output)
    prompt_ids = trajectory.transcripts[0].token_ids[: len(output[0][0])]
    for transcript in trajectory.transcripts:
        mask, logprobs = [False] * len(transcript), [0.0] * len(transcript)
        for version in transcript.policy_versions:
            prompt, completion = left.pop(0)
            restart, end = len(prompt), len(prompt) + len(completion.token_ids)
            assert transcript.token_ids[:restart] == prompt
            assert transcript.token_ids[restart:end] == list(completion.token_ids)
            assert completion.policy_version == version
            mask[restart:end] = [True] * (end - restart)
            logprobs[restart:end] = completion.logprobs
        assert transcript.loss_mask == mask
        assert transcript.logprobs == logprobs
        assert transcript.token_ids[: len(prompt_ids)] == prompt_ids
        assert bool(transcript.reason) == (transcript is not trajectory.transcripts[0])
    assert left == []


@pytest.mark.parametrize("one_message", [False, True])
async def test_every_sampled_token_is_trained_on_exactly_once(one_message: bool) -> None:
    reasons: dict[str, int] = {}
    turns = 0
    for seed in range(EPISODES):
        rng = Random(seed)
        engine = Babbling(rng)
        trajectory = await played(rng, engine, one_message=one_message)
        assert trajectory.failure is None
        check(trajectory, engine.output)
        group = Group(task_key="t", env_key="e", trajectories=(trajectory,))
        samples = assign_credit([group], lambda rewards: [1.0] * len(rewards))
        sampled = [
            pair for _, c in engine.output for pair in zip(c.token_ids, c.logprobs, strict=True)
        ]
        for trained in (samples, split_turns(samples)):
            kept = [
                (token, logprob)
                for sample in trained
                for token, logprob, chosen in zip(
                    sample.token_ids, sample.logprobs, sample.loss_mask, strict=True
                )
                if chosen
            ]
            assert kept == sampled
        turns += len(trajectory.turns)
        for transcript in trajectory.transcripts:
            reasons[transcript.reason] = reasons.get(transcript.reason, 0) + 1
    # The fuzz has met what it is for.
    assert turns > 3 * EPISODES
    assert reasons[HISTORY_CUT] > EPISODES / 2
    assert (reasons.get(STOP_REMOVED, 0) > EPISODES) == one_message
