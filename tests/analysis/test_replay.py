"""A recorded episode can be replayed, and forked at any turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.fakes.chars import END
from tests.fakes.counter_env import PRESS, TASK, CounterEnv, make_factory
from tests.fakes.scripted_engine import ScriptedEngine, token_agent

from skyfleet.analysis.replay import first_difference, replay
from skyfleet.chat.message import Message
from skyfleet.chat.renderers import make_renderer
from skyfleet.envs.env import Env, Step
from skyfleet.errors import EngineError, TaskError
from skyfleet.models.tiny import train_tokenizer
from skyfleet.rollouts.episode import Limits, collect, run_episode
from skyfleet.rollouts.fork import forked_policy, same_tokens
from skyfleet.rollouts.random_agent import random_policy
from skyfleet.rollouts.scripted_agents import oracle_policy, reference_policy
from skyfleet.tasks.task import Grade
from skyfleet.trajectories.trajectory import Ending, Trajectory
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks, open_world

LIMITS = Limits(max_turns=6, max_input_length=1000, trajectory_timeout_seconds=0)


class OtherCounterEnv(CounterEnv):
    """A press adds more than before."""

    async def step(self, action: Message) -> Step:
        step = await super().step(action)
        self.count += bool(action.tool_calls)
        return step


class ForgivingEnv(CounterEnv):
    async def grade(self) -> Grade:
        return Grade(reward=1.0, success=True)


async def played(
    *lines: str, limits: Limits = LIMITS, engine: ScriptedEngine | None = None
) -> Trajectory:
    policy = token_agent(engine or ScriptedEngine(*lines))
    return await run_episode(TASK, make_factory(CounterEnv()), policy, limits)


async def replayed(trajectory: Trajectory, env: Env) -> str | None:
    return (await replay(trajectory, TASK, make_factory(env))).difference


@pytest.mark.parametrize("world", WORLD_NAMES)
async def test_every_built_in_environment_is_deterministic(world: str) -> None:
    tasks = generate_world_tasks(world, split="all", count=5)
    for policy in (oracle_policy, random_policy(seed=1)):
        groups = await collect(tasks, open_world, policy, LIMITS, n_samples=1, max_concurrent=5)
        for task, group in zip(tasks, groups, strict=True):
            (recorded,) = group.trajectories
            again = await replay(recorded, task, open_world)
            assert again.difference is None
            assert again.replayed.grade == recorded.grade
            assert again.replayed.ending == recorded.ending


async def test_every_ending_is_reproduced() -> None:
    done = await played(PRESS % 3, "done")
    cut = await played(PRESS % 3, limits=replace(LIMITS, max_turns=1))
    full = await played(PRESS % 3, limits=replace(LIMITS, max_input_length=20))
    long = await played(
        engine=ScriptedEngine(PRESS % 3, finish="length"), limits=replace(LIMITS, max_turns=1)
    )
    endings = [episode.ending for episode in (done, cut, full, long)]
    assert endings == [Ending.DONE, Ending.MAX_TURNS, Ending.CONTEXT_FULL, Ending.LENGTH]
    for episode in (done, cut, full, long):
        again = await replay(episode, TASK, make_factory(CounterEnv()))
        assert again.difference is None
        assert again.replayed.ending is episode.ending


async def test_an_aborted_episode_is_compared_up_to_its_last_turn() -> None:
    broken = await played(engine=ScriptedEngine(PRESS % 1, EngineError("it is gone")))
    assert (broken.ending, len(broken.turns)) == (Ending.FAILED, 1)
    assert await replayed(broken, CounterEnv()) is None
    difference = await replayed(broken, CounterEnv(breaks="step"))
    assert difference == "turns: recorded 1, replayed '0, failed: step: OSError: it broke'"


async def test_the_first_difference_is_named_with_both_sides() -> None:
    recorded = await played(PRESS % 1, PRESS % 1, PRESS % 1, "done")
    assert recorded.success
    difference = await replayed(recorded, OtherCounterEnv())
    assert difference is not None
    assert difference.startswith("replies of turn 2: recorded ")
    assert "content='2'" in difference.partition(", replayed ")[0]
    assert "content='3'" in difference.partition(", replayed ")[2]


async def test_a_different_or_missing_grade_is_a_difference() -> None:
    recorded = await played(PRESS % 1, "done")
    assert "grade: " in str(await replayed(recorded, ForgivingEnv()))
    broken = await replayed(recorded, CounterEnv(breaks="grade"))
    assert "it broke" in str(broken)


async def test_an_environment_that_fails_to_open_is_a_difference() -> None:
    recorded = await played(PRESS % 1, "done")
    assert str(await replayed(recorded, CounterEnv(breaks="reset"))).startswith("prompt: ")


async def test_a_longer_replay_is_a_difference() -> None:
    recorded = await played(PRESS % 1, "done")
    assert first_difference(replace(recorded, turns=recorded.turns[:1]), recorded) == (
        "turns: recorded 1, replayed '2, done'"
    )


async def test_a_fork_repeats_the_recorded_turns_and_continues_with_the_other_policy() -> None:
    recorded = await played(PRESS % 1, PRESS % 5, "done")
    other = token_agent(ScriptedEngine(PRESS % 2, "done"))
    policy = forked_policy(recorded, other, turn=1)
    forked = await run_episode(TASK, make_factory(CounterEnv()), policy, LIMITS)
    assert [turn.action.text for turn in forked.turns][-1] == "done"
    assert [reply.text for turn in forked.turns for reply in turn.replies] == ["1", "3"]
    assert (recorded.success, forked.success) == (False, True)


async def test_a_fork_continues_from_the_sampled_tokens() -> None:
    # Rendering the message again would lose the spaces.
    recorded = await played(f"  {PRESS % 1}", PRESS % 5, "done")
    engine = ScriptedEngine(PRESS % 2, "done")
    policy = forked_policy(recorded, token_agent(engine), turn=1)
    forked = await run_episode(TASK, make_factory(CounterEnv()), policy, LIMITS)
    before = [*map(ord, "reach 3"), END, *map(ord, f"  {PRESS % 1}"), END, ord("1"), END]
    (transcript,) = forked.transcripts
    assert transcript.token_ids[: len(before)] == before
    assert not any(transcript.loss_mask[: len(before)])
    assert transcript.loss_mask[len(before)]
    (whole,) = recorded.transcripts
    assert whole.token_ids[: len(before)] == before
    assert same_tokens(recorded, forked, turn=1)
    assert engine.released == ["t/0"]


async def test_a_chatml_fork_starts_with_the_recorded_tokens() -> None:
    limits = replace(LIMITS, max_input_length=100_000)
    tasks = generate_world_tasks("github", split="train", count=5)
    policy = reference_policy(make_renderer(train_tokenizer([], vocab_size=0)))
    for task in tasks:
        recorded = await run_episode(task, open_world, policy, limits)
        turn = len(recorded.turns) - 1
        forked = await run_episode(
            task, open_world, forked_policy(recorded, policy, turn=turn), limits
        )
        (whole,), (part,) = recorded.transcripts, forked.transcripts
        given = part.loss_mask.index(True)
        assert part.token_ids[:given] == whole.token_ids[:given]
        assert sum(whole.loss_mask[given:]) == len(whole.token_ids[given:])


async def test_a_policy_with_another_tokenizer_continues_from_the_messages() -> None:
    recorded = await played(f"  {PRESS % 1}", PRESS % 5, "done")
    strange = replace(recorded.transcripts[0], token_ids=[7] * len(recorded.transcripts[0]))
    recorded = replace(recorded, transcripts=(strange,))
    policy = forked_policy(recorded, token_agent(ScriptedEngine(PRESS % 2, "done")), turn=1)
    forked = await run_episode(TASK, make_factory(CounterEnv()), policy, LIMITS)
    assert forked.success
    assert not same_tokens(recorded, forked, turn=1)
    # CharRenderer renders only the text of a message.
    assert forked.transcripts[0].token_ids[:10] == [*map(ord, "reach 3"), END, END, ord("1")]


async def test_a_fork_at_the_first_turn_only_runs_the_other_policy() -> None:
    recorded = await played(PRESS % 1, "done")
    policy = forked_policy(recorded, token_agent(ScriptedEngine(PRESS % 3, "done")), turn=0)
    forked = await run_episode(TASK, make_factory(CounterEnv()), policy, LIMITS)
    assert forked.success


async def test_an_environment_with_different_replies_cannot_be_forked() -> None:
    recorded = await played(PRESS % 1, PRESS % 1, PRESS % 1, "done")
    policy = forked_policy(recorded, token_agent(ScriptedEngine("done")), turn=2)
    forked = await run_episode(TASK, make_factory(OtherCounterEnv()), policy, LIMITS)
    assert (forked.ending, forked.grade) == (Ending.FAILED, None)
    assert forked.failure is not None
    assert forked.failure.kind == "ReplayDiffersError"
    assert "'3'" in forked.failure.detail


async def test_a_fork_at_a_missing_turn_raises() -> None:
    recorded = await played(PRESS % 1, "done")
    for turn in (-1, 2):
        with pytest.raises(TaskError, match=rf"turn {turn + 1}: the episode has 2 turns"):
            forked_policy(recorded, oracle_policy, turn=turn)


async def test_the_oracle_can_finish_a_forked_episode() -> None:
    (task,) = generate_world_tasks("github", split="train", count=1)
    (group,) = await collect(
        [task], open_world, random_policy(seed=0), LIMITS, n_samples=1, max_concurrent=1
    )
    (begun,) = group.trajectories
    forked = await run_episode(
        task, open_world, forked_policy(begun, oracle_policy, turn=2), LIMITS
    )
    assert (begun.success, forked.success) == (False, True)
    assert [t.action for t in forked.turns[:2]] == [t.action for t in begun.turns[:2]]
