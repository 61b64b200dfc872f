"""A turn cut by the token limit is given to the environment, and its tokens stay exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.chat.builtin_templates import (
    GLM,
    GLM_TOKENS,
    HARMONY,
    HARMONY_TOKENS,
    KIMI_K2_TOKENS,
    LLAMA3,
    LLAMA3_MARKS,
    kimi_k2_template,
)
from tests.chat.small_tokenizer import chatml_template, small_tokenizer
from tests.fakes.counter_env import PRESS, TASK, CounterEnv, make_factory

from skyfleet.algorithms.credit_assignment import assign_credit
from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation, Step
from skyfleet.envs.skyrl_gym import SkyrlGymSettings, skyrl_gym_factory
from skyfleet.rollouts.conversation import AgentFactory, TokenConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import recorded_limits, recorded_policy
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory

LIMITS = Limits(max_turns=4, max_input_length=10_000, trajectory_timeout_seconds=5)
RENDERERS = {
    "chatml": small_tokenizer(chatml_template()),
    "llama3": small_tokenizer(LLAMA3, special_tokens=LLAMA3_MARKS),
    "kimi_k2": small_tokenizer(
        kimi_k2_template(thinks=True, compact=False), special_tokens=KIMI_K2_TOKENS
    ),
    "glm": small_tokenizer(GLM, special_tokens=GLM_TOKENS),
    "harmony": small_tokenizer(HARMONY, special_tokens=HARMONY_TOKENS),
}
CHATML = RENDERERS["chatml"]
TOOL = ToolSpec(
    name="press",
    description="Press the button.",
    parameters={"type": "object", "properties": {"by": {"type": "integer"}}},
)


class TokenLines:
    """An engine that samples the given tokens; a line with finish "length" lacks its end."""

    policy_version = 0

    def __init__(self, *lines: tuple[Sequence[int], Finish]) -> None:
        self._lines = list(lines)
        self.prompts: list[list[int]] = []
        self.completions: list[Completion] = []

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        self.prompts.append(list(token_ids))
        sampled, finish = self._lines.pop(0)
        completion = Completion(
            token_ids=tuple(sampled),
            logprobs=tuple(-0.1 - i for i, _ in enumerate(sampled)),
            finish=finish,
            policy_version=0,
        )
        self.completions.append(completion)
        return completion

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class PatientEnv(CounterEnv):
    """Records every action; ends when an action says "end"."""

    def __init__(self, tools: tuple[ToolSpec, ...] = ()) -> None:
        super().__init__()
        self.actions: list[Message] = []
        self._tools = tools

    async def reset(self) -> Observation:
        return replace(await super().reset(), tools=self._tools)

    async def step(self, action: Message) -> Step:
        self.actions.append(action)
        reply = Message(role="user", content="go on")
        return Step(messages=(reply,), done="end" in action.text)


def policy_of(engine: TokenLines, renderer: Renderer) -> AgentFactory:
    def start(task: Task, observation: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            observation,
            engine=engine,
            renderer=renderer,
            sampling=SamplingParams(),
            session=session,
        )

    return start


def written(renderer: Renderer, text: str) -> list[int]:
    """The tokens of a complete turn, its end included."""
    return renderer.render_completion(Message(role="assistant", content=text))


async def run_counter(
    *lines: tuple[str, Finish], max_turns: int = 4, env: CounterEnv | None = None
) -> Trajectory:
    renderer = make_renderer(CHATML)
    tokens = [(CHATML.encode(text), finish) for text, finish in lines]
    limits = replace(LIMITS, max_turns=max_turns)
    policy = policy_of(TokenLines(*tokens), renderer)
    return await run_episode(TASK, make_factory(env or CounterEnv()), policy, limits)


CALL = f"<tool_call>\n{PRESS % 3}\n</tool_call>"


async def test_a_cut_turn_is_given_to_the_environment_and_may_solve_the_task() -> None:
    trajectory = await run_counter((CALL, "length"), ("done<|im_end|>", "stop"))
    assert trajectory.success
    assert [turn.finish_reason for turn in trajectory.turns] == ["length", "stop"]
    assert trajectory.ending is Ending.DONE
    assert not trajectory.ending.truncated


async def test_an_episode_whose_last_turn_was_cut_is_truncated_even_if_it_is_done() -> None:
    trajectory = await run_counter((f"{CALL}<|im_end|>", "stop"), ("I am don", "length"))
    assert (trajectory.ending, trajectory.reward) == (Ending.LENGTH, 1.0)
    assert trajectory.ending.truncated


async def test_a_cut_turn_that_is_the_last_one_allowed_is_truncated_by_length() -> None:
    trajectory = await run_counter((CALL, "length"), max_turns=1)
    assert (trajectory.ending, trajectory.reward) == (Ending.LENGTH, 1.0)


async def test_a_cut_tool_call_is_malformed() -> None:
    env = PatientEnv(tools=(TOOL,))
    cut = CALL.partition("3}")[0] + "3"
    await run_counter((cut, "length"), ("end<|im_end|>", "stop"), env=env)
    assert env.actions[0].tool_calls == ()
    assert len(env.actions[0].malformed_calls) == 1


@pytest.mark.parametrize("name", RENDERERS)
def test_no_cut_of_a_tool_call_is_read_as_another_call(name: str) -> None:
    renderer = make_renderer(RENDERERS[name])
    call = ToolCall(id="functions.press:0", name="press", arguments={"by": 345})
    tokens = renderer.render_completion(Message(role="assistant", tool_calls=(call,)))
    for end in range(len(tokens)):
        for one in renderer.parse(tokens[:end], [TOOL]).tool_calls:
            assert (one.name, one.arguments) == ("press", {"by": 345})


async def test_a_right_gsm8k_answer_that_was_cut_earns_its_reward() -> None:
    renderer = make_renderer(CHATML)
    task = Task(
        key="g",
        env_key="gsm8k",
        prompt="What is 48 + 24?",
        metadata={"reward_spec": {"ground_truth": "72"}},
    )
    engine = TokenLines((CHATML.encode("48 + 24 = 72\n#### 72"), "length"))
    open_env = skyrl_gym_factory(SkyrlGymSettings(env_id="gsm8k", max_turns=1))
    trajectory = await run_episode(task, open_env, policy_of(engine, renderer), LIMITS)
    assert (trajectory.reward, trajectory.success) == (1.0, True)
    assert trajectory.ending is Ending.LENGTH


@pytest.mark.parametrize("name", RENDERERS)
async def test_the_end_that_a_cut_turn_lacks_is_prompt_and_not_trained_on(name: str) -> None:
    tokenizer: Any = RENDERERS[name]
    renderer = make_renderer(tokenizer)
    whole, last = written(renderer, "A heron is a bird"), written(renderer, "the end")
    cut = whole[: len(whole) - 3]
    engine, env = TokenLines((cut, "length"), (last, "stop")), PatientEnv()
    trajectory = await run_episode(TASK, make_factory(env), policy_of(engine, renderer), LIMITS)
    assert [turn.finish_reason for turn in trajectory.turns] == ["length", "stop"]
    (transcript,) = trajectory.transcripts
    first, second = engine.prompts
    assert transcript.token_ids == [*second, *last]
    assert second[: len(first) + len(cut)] == [*first, *cut]
    between = renderer.text(second[len(first) + len(cut) :])
    assert "go on" in between
    # What the template puts between two complete turns, the end of the first one included.
    complete = renderer.render_continuation(whole[-1], [Message(role="user", content="go on")])
    assert complete is not None
    assert second[-len(complete) :] == complete
    sampled = [
        (token, logprob)
        for token, logprob, mine in zip(
            transcript.token_ids, transcript.logprobs, transcript.loss_mask, strict=True
        )
        if mine
    ]
    assert sampled == [
        pair for c in engine.completions for pair in zip(c.token_ids, c.logprobs, strict=True)
    ]


async def test_overlong_filtering_masks_an_episode_whose_last_turn_was_cut() -> None:
    cut = await run_counter((f"{CALL}<|im_end|>", "stop"), ("I am don", "length"))
    continued = await run_counter((CALL, "length"), ("done<|im_end|>", "stop"))
    for trajectory, n_samples in ((cut, 0), (continued, 1)):
        group = Group(task_key="t", env_key="e", trajectories=(trajectory,))
        assert len(assign_credit([group], list, mask_unfinished=True)) == n_samples


async def test_an_episode_with_cut_turns_is_replayed_as_it_was() -> None:
    done = await run_counter((CALL, "length"), ("I am don", "length"))
    stopped = await run_counter((CALL, "length"), max_turns=1)
    continued = await run_counter((CALL, "length"), ("done<|im_end|>", "stop"))
    for trajectory in (done, stopped, continued):
        again = await run_episode(
            TASK,
            make_factory(CounterEnv()),
            recorded_policy(trajectory),
            recorded_limits(trajectory, timeout_seconds=5),
        )
        assert (again.ending, again.grade) == (trajectory.ending, trajectory.grade)
        finishes = [turn.finish_reason for turn in trajectory.turns]
        assert [turn.finish_reason for turn in again.turns] == finishes
