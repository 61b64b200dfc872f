"""The environment of examples/add_an_env runs as its README says."""

from __future__ import annotations

from pathlib import Path

from examples.add_an_env.env import SafeEnv, open_env

from skyfleet.chat.message import Message, ToolCall
from skyfleet.config.loading import load_config
from skyfleet.envs.registry import env_factory
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.loading import load_tasks
from skyfleet.trajectories.trajectory import Ending

FOLDER = Path(__file__).parents[2] / "examples" / "add_an_env"
LIMITS = Limits(max_turns=4, max_input_length=512, trajectory_timeout_seconds=5)
ENV = "examples.add_an_env.env:open_env"
TASKS = load_tasks(FOLDER / "tasks.jsonl")


def _dial(number: object) -> Message:
    call = ToolCall(id="0", name="turn_dial", arguments={"number": number})
    return Message(role="assistant", tool_calls=(call,))


async def test_every_task_is_solved_by_its_solution_and_not_by_doing_nothing() -> None:
    factory = env_factory(load_config("", [f"environment.env_class={ENV}"]))
    for task in TASKS:
        solved = await run_episode(task, factory, oracle_policy, LIMITS)
        idle = await run_episode(task, factory, null_policy, LIMITS)
        assert (solved.ending, solved.reward) == (Ending.DONE, 1.0)
        assert len(solved.turns) == len(task.solution)
        assert (idle.ending, idle.reward) == (Ending.MAX_TURNS, 0.0)


async def test_a_wrong_number_is_answered_with_its_direction() -> None:
    env = await open_env(TASKS[0])
    await env.reset()
    low, high = await env.step(_dial(49)), await env.step(_dial(51))
    assert [step.messages[0].text for step in (low, high)] == ["Too low.", "Too high."]
    assert not low.done
    assert not (await env.grade()).success


async def test_an_invalid_call_returns_an_error_message_to_the_agent() -> None:
    env = SafeEnv(TASKS[0])
    await env.reset()
    (reply,) = (await env.step(_dial("fifty"))).messages
    assert reply.is_error
    assert "turn_dial" in reply.text
