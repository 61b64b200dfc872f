"""Native tool calling: the server renders and parses, and its tokens are the transcript."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fakes.counter_env import TASK, CounterEnv, make_factory
from tests.fakes.serving import serving
from tests.fakes.small_models import logprobs_of
from tests.fakes.tiny_policy import MODEL, tiny_policy

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines.chat_engine import ChatCompletion, ChatEngine
from skyfleet.engines.openai_chat import OpenAIChatEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.context_env import ContextEnv
from skyfleet.envs.env import Observation
from skyfleet.rollouts.conversation import HISTORY_CUT, REWRITTEN, AgentFactory
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.native_tool_calling import NativeToolConversation
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending

LIMITS = Limits(max_turns=4, max_input_length=100, trajectory_timeout_seconds=5)


class Script:
    """Returns its lines with their tokens."""

    def __init__(self, *lines: tuple[Message, Sequence[int], Sequence[int]]) -> None:
        self.policy_version = 0
        self.released: list[str] = []
        self.received: list[int] = []
        self.finish: Finish = "stop"
        self._lines = list(lines)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> ChatCompletion:
        self.received.append(len(messages))
        message, prompt, output = self._lines.pop(0)
        version, self.policy_version = self.policy_version, self.policy_version + 1
        completion = Completion(
            token_ids=tuple(output),
            logprobs=(-0.5,) * len(output),
            finish=self.finish,
            policy_version=version,
        )
        return ChatCompletion(
            message=message, prompt_token_ids=tuple(prompt), completion=completion
        )

    async def release(self, session: str) -> None:
        self.released.append(session)


def native_agent(engine: ChatEngine, sampling: SamplingParams | None = None) -> AgentFactory:
    def start(task: Task, observation: Observation, session: str) -> NativeToolConversation:
        return NativeToolConversation(
            observation,
            engine=engine,
            sampling=sampling or SamplingParams(),
            session=session,
            max_input_length=LIMITS.max_input_length,
        )

    return start


def press(by: int) -> Message:
    call = ToolCall(id="0", name="press", arguments={"by": by})
    return Message(role="assistant", tool_calls=(call,))


DONE = Message(role="assistant", content="done")
CUT_ALL = ToolCall(id="1", name="manage_context", arguments={"keep_recent_turns": 0})


async def test_a_prompt_that_continues_the_tokens_so_far_grows_one_transcript() -> None:
    script = Script(
        (press(1), [1, 2], [3, 4]),
        (press(2), [1, 2, 3, 4, 5], [6]),
        (DONE, [1, 2, 3, 4, 5, 6, 7], [8]),
    )
    trajectory = await run_episode(TASK, make_factory(CounterEnv()), native_agent(script), LIMITS)
    assert trajectory.ending is Ending.DONE
    assert trajectory.grade is not None
    assert trajectory.grade.success
    (transcript,) = trajectory.transcripts
    assert transcript.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [int(chosen) for chosen in transcript.loss_mask] == [0, 0, 1, 1, 0, 1, 0, 1]
    assert transcript.policy_versions == [0, 1, 2]
    assert script.received == [1, 3, 5]
    assert script.released == ["t/0"]


async def test_a_prompt_that_rewrites_the_past_begins_another_transcript() -> None:
    script = Script((press(3), [1, 2], [3, 4]), (DONE, [1, 2, 9], [8]))
    trajectory = await run_episode(TASK, make_factory(CounterEnv()), native_agent(script), LIMITS)
    assert [t.token_ids for t in trajectory.transcripts] == [[1, 2, 3, 4], [1, 2, 9, 8]]
    assert [t.policy_versions for t in trajectory.transcripts] == [[0], [1]]
    assert [t.reason for t in trajectory.transcripts] == ["", REWRITTEN]


async def test_an_empty_answer_is_an_empty_turn_without_tokens() -> None:
    nothing = Message(role="assistant")
    trajectory = await run_episode(
        TASK, make_factory(CounterEnv()), native_agent(Script((nothing, [], []))), LIMITS
    )
    assert trajectory.ending is Ending.DONE
    assert [turn.action for turn in trajectory.turns] == [nothing]
    assert trajectory.transcripts == ()


async def test_a_turn_cut_by_its_length_is_given_to_the_environment() -> None:
    script = Script((press(3), [1], [2]), (DONE, [1, 2, 9], [8]))
    script.finish = "length"
    trajectory = await run_episode(TASK, make_factory(CounterEnv()), native_agent(script), LIMITS)
    assert (trajectory.ending, trajectory.reward) == (Ending.LENGTH, 1.0)
    assert [turn.finish_reason for turn in trajectory.turns] == ["length", "length"]


async def test_an_episode_with_a_full_context_takes_no_more_turns() -> None:
    script = Script((press(1), range(99), range(10)), (DONE, [], []))
    trajectory = await run_episode(TASK, make_factory(CounterEnv()), native_agent(script), LIMITS)
    assert trajectory.ending is Ending.CONTEXT_FULL
    assert len(trajectory.turns) == 1


async def test_an_answer_to_a_prompt_over_the_limit_is_no_turn_and_not_trained_on() -> None:
    script = Script((press(3), [1, 2], [3, 4]), (DONE, range(101), [8]))
    trajectory = await run_episode(TASK, make_factory(CounterEnv()), native_agent(script), LIMITS)
    assert (trajectory.ending, trajectory.reward) == (Ending.CONTEXT_FULL, 1.0)
    assert len(trajectory.turns) == 1
    assert [t.token_ids for t in trajectory.transcripts] == [[1, 2, 3, 4]]


async def test_a_prompt_of_exactly_the_limit_is_answered() -> None:
    script = Script((DONE, range(100), [8]))
    trajectory = await run_episode(TASK, make_factory(CounterEnv()), native_agent(script), LIMITS)
    assert trajectory.ending is Ending.DONE
    assert len(trajectory.transcripts) == 1


async def test_a_cut_history_is_what_the_engine_is_sent_and_why_another_transcript_begins() -> None:
    cut = Message(role="assistant", tool_calls=(CUT_ALL,))
    script = Script(
        (press(3), [1, 2], [3, 4]), (cut, range(1, 90), range(90, 105)), (DONE, [1, 2, 9], [8])
    )
    env = ContextEnv(CounterEnv(), page_characters=1000)
    trajectory = await run_episode(TASK, make_factory(env), native_agent(script), LIMITS)
    # The second turn filled the context, and the third was sampled all the same.
    assert trajectory.ending is Ending.DONE
    assert script.received == [
        1,
        3,
        3,
    ]  # the task, and after the cut the cutting turn and its answer
    assert [t.reason for t in trajectory.transcripts] == ["", HISTORY_CUT]


async def test_a_cut_explains_the_next_transcript_and_no_other() -> None:
    cut = Message(role="assistant", tool_calls=(CUT_ALL,))
    script = Script(
        (press(3), [1, 2], [3]),
        (cut, [1, 2, 3, 4], [5]),
        (press(0), [1, 9], [8]),
        (DONE, [7], [8]),
    )
    env = ContextEnv(CounterEnv(), page_characters=1000)
    trajectory = await run_episode(TASK, make_factory(env), native_agent(script), LIMITS)
    assert [t.reason for t in trajectory.transcripts] == ["", HISTORY_CUT, REWRITTEN]


async def test_a_turn_without_tokens_does_not_hide_the_cut_before_it() -> None:
    conversation = native_agent(
        Script(
            (press(1), [1], [2]), (press(1), [1, 2, 3], [4]), (press(1), [1], []), (DONE, [1], [8])
        )
    )(TASK, Observation(messages=(Message(role="user", content="reach 3"),)), "s")
    for keep in (0, 0, 5):
        await conversation.generate()
        conversation.truncate_history(keep_recent_turns=keep)
        conversation.observe([Message(role="tool", content="1")])
    await conversation.generate()
    assert [t.reason for t in conversation.transcripts] == ["", HISTORY_CUT]


async def test_our_server_keeps_an_episode_in_one_transcript_with_its_exact_tokens() -> None:
    policy_model = tiny_policy()
    sampling = SamplingParams(max_generate_length=9, temperature=1.5, seed=3)
    async with (
        serving(policy_model.app(policy_model.engine())) as url,
        OpenAIChatEngine(f"{url}/v1", model=MODEL) as engine,
    ):
        conversation = NativeToolConversation(
            Observation(messages=(Message(role="user", content="hi"),)),
            engine=engine,
            sampling=sampling,
            session="s",
            max_input_length=1000,
        )
        for _ in range(3):
            await conversation.generate()
            conversation.observe([Message(role="user", content="go on")])
    (transcript,) = conversation.transcripts
    assert sum(transcript.loss_mask) == 27
    expected = logprobs_of(
        policy_model.decoder, transcript.token_ids, len(transcript) - 1, temperature=1.5
    ).tolist()
    chosen = [i for i, mine in enumerate(transcript.loss_mask) if mine]
    for i in chosen:
        assert abs(transcript.logprobs[i] - expected[i - 1]) < 1e-5


class Wondering:
    """Makes one call after a thought of the session's own."""

    policy_version = 0

    def __init__(self, call: str = '{"name": "look", "arguments": {}}') -> None:
        self.prompts: dict[str, list[str]] = {}
        self._call = f"<tool_call>\n{call}\n</tool_call>"

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        self.prompts.setdefault(session, []).append(tiny_policy().renderer.text(token_ids))
        text = f"<think>\nI am {session}.\n</think>\n\nHm.\n{self._call}<|im_end|>"
        output = tiny_policy().tokenizer.encode(text, add_special_tokens=False)
        return Completion(
            token_ids=tuple(output), logprobs=(-1.0,) * len(output), finish="stop", policy_version=0
        )

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


async def test_sessions_with_equal_messages_continue_from_their_own_reasoning() -> None:
    look = ToolSpec(name="look", description="Look.", parameters={"type": "object"})
    asked, seen = Message(role="user", content="hi"), Message(role="tool", content="nothing")
    engine = Wondering()
    async with (
        serving(tiny_policy().app(engine, max_model_len=4000)) as url,
        OpenAIChatEngine(f"{url}/v1", model=MODEL) as client,
    ):
        both = [
            NativeToolConversation(
                Observation(messages=(asked,), tools=(look,)),
                engine=client,
                sampling=SamplingParams(max_generate_length=200),
                session=session,
                max_input_length=4000,
            )
            for session in ("Ann", "Bob")
        ]
        for _ in range(2):
            for one in both:
                await one.generate()
            for one in both:
                one.observe([seen])
    assert [len(one.transcripts) for one in both] == [1, 1]
    for name, other in (("Ann", "Bob"), ("Bob", "Ann")):
        assert f"I am {name}." in engine.prompts[name][1]
        assert f"I am {other}." not in engine.prompts[name][1]


async def test_a_call_that_our_server_could_not_parse_is_malformed() -> None:
    look = ToolSpec(name="look", description="Look.", parameters={"type": "object"})
    async with (
        serving(tiny_policy().app(Wondering('{"name": "look", "argu'), max_model_len=4000)) as url,
        OpenAIChatEngine(f"{url}/v1", model=MODEL) as client,
    ):
        conversation = NativeToolConversation(
            Observation(messages=(Message(role="user", content="hi"),), tools=(look,)),
            engine=client,
            sampling=SamplingParams(max_generate_length=200),
            session="Ann",
            max_input_length=4000,
        )
        for _ in range(3):
            message = await conversation.generate()
            assert (message.text, len(message.malformed_calls)) == ("Hm.", 1)
            assert "argu" in message.malformed_calls[0]
            conversation.observe([Message(role="user", content="no")])
    assert len(conversation.transcripts) == 1
