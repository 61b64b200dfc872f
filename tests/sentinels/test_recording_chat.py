"""Turns that a server renders are recorded as turns of the engine are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.fakes.counter_env import TASK, CounterEnv, make_factory
from tests.rollouts.test_native_tool_calling import LIMITS, Script

from skyfleet.chat.message import Message, ToolCall
from skyfleet.engines.chat_engine import TrainedChat
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation
from skyfleet.rollouts.episode import run_episode
from skyfleet.rollouts.native_tool_calling import NativeToolConversation
from skyfleet.sentinels.recording_engine import RecordingChat, RecordingEngine
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Group, Trajectory

PRESS = Message(
    role="assistant", tool_calls=(ToolCall(id="call_0", name="press", arguments={"by": 3}),)
)
STOP = Message(role="assistant", content="done")


class Idle:
    """An engine that samples nothing by itself."""

    def __init__(self) -> None:
        self.policy_version, self.released = 7, list[str]()

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> None:
        raise AssertionError("the server renders and samples")

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


def play(script: Script, recording: RecordingEngine) -> Trajectory:
    chat = RecordingChat(script, recording, max_input_length=LIMITS.max_input_length)

    def start(task: Task, observation: Observation, session: str) -> NativeToolConversation:
        return NativeToolConversation(
            observation,
            engine=chat,
            sampling=SamplingParams(),
            session=session,
            max_input_length=LIMITS.max_input_length,
        )

    return asyncio.run(run_episode(TASK, make_factory(CounterEnv()), start, LIMITS))


def test_every_turn_of_a_native_episode_is_in_its_transcripts() -> None:
    recording = RecordingEngine(Idle())  # type: ignore[arg-type]
    script = Script((PRESS, (1, 2), (3, 4)), (STOP, (1, 2, 3, 4, 5), (6,)))
    trajectory = play(script, recording)
    group = Group(task_key="t", env_key="counter", trajectories=(trajectory,))
    (recorded,), lost = recording.drain([group])
    assert (recorded.n_sampled, lost) == (3, 0)
    assert all(one.follows(recorded.transcript.token_ids) for one in recorded.completions)


def test_turns_that_the_episode_discards_are_not_recorded() -> None:
    """One without tokens, and one after a prompt that is too long."""
    recording = RecordingEngine(Idle())  # type: ignore[arg-type]
    script = Script((PRESS, (1, 2), ()), (STOP, (1,) * (LIMITS.max_input_length + 1), (6,)))
    trajectory = play(script, recording)
    group = Group(task_key="t", env_key="counter", trajectories=(trajectory,))
    assert recording.drain([group]) == ((), 0)


def test_the_chat_of_a_trained_server_has_the_version_of_its_engine() -> None:
    engine, script = Idle(), Script((STOP, (1, 2), (3,)))
    chat = TrainedChat(script, engine)  # type: ignore[arg-type]
    turn = asyncio.run(chat.chat([], (), SamplingParams(), session="s"))
    asyncio.run(chat.release("s"))
    assert (turn.completion.policy_version, chat.policy_version, engine.released) == (7, 7, ["s"])
