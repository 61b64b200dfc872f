"""One-message mode: observations stand between the sampled texts, and no stop token does."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fakes.chars import END, CharRenderer
from tests.fakes.counter_env import TASK, CounterEnv, make_factory

from skyfleet.chat.message import Message, Role, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Completion, Transcript
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation, Step
from skyfleet.rollouts.conversation import HISTORY_CUT
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.one_message import STOP_REMOVED, OneMessageConversation
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Trajectory

LIMITS = Limits(max_turns=8, max_input_length=1000, trajectory_timeout_seconds=5)


class Prompting(CharRenderer):
    """Opens as templates do: what comes last is no stop token."""

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return [*super().render_prompt(messages, tools), ord(">")]


class Lines:
    """Returns its lines unchanged; `|` is the stop token."""

    policy_version = 3

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)
        self.shown: list[str] = []

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        self.shown.append(readable(token_ids))
        output = tuple(END if c == "|" else ord(c) for c in self._lines.pop(0))
        logprobs = tuple(-float(len(self.shown)) for _ in output)
        return Completion(token_ids=output, logprobs=logprobs, finish="stop", policy_version=3)

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Oracle(CounterEnv):
    """Answers `?` and ends at `!`; `cut` leaves one turn before this one in view."""

    async def step(self, action: Message) -> Step:
        if "!" in action.text:
            return Step(done=True)
        role: Role = "tool" if "tool" in action.text else "user"
        keep = 1 if "cut" in action.text else None
        return Step(messages=(Message(role=role, content="so"),), keep_recent_turns=keep)


def readable(token_ids: Sequence[int]) -> str:
    return "".join("|" if token == END else chr(token) for token in token_ids)


def sampled_text(transcript: Transcript) -> str:
    return "".join(
        c
        for c, mine in zip(readable(transcript.token_ids), transcript.loss_mask, strict=True)
        if mine
    )


async def played(engine: Lines, renderer: Renderer | None = None) -> Trajectory:
    def start(task: Task, opened: Observation, session: str) -> OneMessageConversation:
        return OneMessageConversation(
            opened,
            engine=engine,
            renderer=renderer or Prompting(),
            sampling=SamplingParams(),
            session=session,
            encode=lambda text: [*map(ord, text)],
        )

    return await run_episode(TASK, make_factory(Oracle()), start, LIMITS)


async def test_observations_are_inserted_verbatim_between_the_sampled_texts() -> None:
    engine = Lines("a?", "tool?", "b!|")
    trajectory = await played(engine)
    assert trajectory.ending is Ending.DONE
    (transcript,) = trajectory.transcripts
    whole = "reach 3|>a?sotool?sob!|"
    assert readable(transcript.token_ids) == whole
    assert sampled_text(transcript) == "a?tool?b!|"
    assert [p for p in transcript.logprobs if p] == [-1.0] * 2 + [-2.0] * 5 + [-3.0] * 3
    assert transcript.policy_versions == [3, 3, 3]


async def test_a_sampled_stop_token_is_trained_on_and_removed_from_the_next_context() -> None:
    engine = Lines("a?|", "b?", "c!|")
    first, second = (await played(engine)).transcripts
    assert (readable(first.token_ids), sampled_text(first)) == ("reach 3|>a?|", "a?|")
    assert (readable(second.token_ids), sampled_text(second)) == (
        "reach 3|>a?sob?soc!|",
        "b?c!|",
    )
    assert (first.reason, second.reason) == ("", STOP_REMOVED)
    assert engine.shown == ["reach 3|>", "reach 3|>a?so", "reach 3|>a?sob?so"]


async def test_a_cut_keeps_the_prompt_and_the_exact_tokens_of_the_turns_that_stay() -> None:
    engine = Lines("a?", "b?", "cut?|", "d?", "cut?", "e!")
    trajectory = await played(engine)
    assert [t.reason for t in trajectory.transcripts] == ["", HISTORY_CUT, HISTORY_CUT]
    assert [readable(t.token_ids) for t in trajectory.transcripts] == [
        "reach 3|>a?sob?socut?|",
        "reach 3|>b?socut?sod?socut?",
        "reach 3|>d?socut?soe!",
    ]
    assert [sampled_text(t) for t in trajectory.transcripts] == ["a?b?cut?|", "d?cut?", "e!"]


async def test_a_cut_that_removes_nothing_starts_no_transcript() -> None:
    (transcript,) = (await played(Lines("a?", "cut?", "b!"))).transcripts
    assert readable(transcript.token_ids) == "reach 3|>a?socut?sob!"


async def test_an_empty_turn_removes_no_stop_token() -> None:
    # Here the prompt itself ends with the token that would be taken back.
    (transcript,) = (await played(Lines("", "b!"), CharRenderer())).transcripts
    assert readable(transcript.token_ids) == "reach 3|sob!"
