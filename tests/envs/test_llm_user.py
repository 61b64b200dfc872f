"""Users played by a model behind an endpoint: tokens, roles, failures, and an endpoint that dies."""

from __future__ import annotations

import asyncio

from tests.fakes.user_endpoint import user_endpoint

from skyfleet.config.environment import Environment
from skyfleet.config.root import RunConfig
from skyfleet.config.simulated_user import SimulatedUser
from skyfleet.envs.registry import env_factory
from skyfleet.envs.users.factory import build_user_factory
from skyfleet.envs.users.scenario import Fact, Scenario
from skyfleet.metrics.rollout_metrics import episode_metrics
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.scripted_agents import oracle_policy
from skyfleet.worlds.catalog import generate_world_tasks

SCENARIO = Scenario(
    opening="I want a bigger plan.",
    facts=(Fact(text="My PIN is 4711.", asked_by=("pin",)),),
    changes_of_mind=("No, make it Max.",),
)
LIMITS = Limits(max_turns=30, max_input_length=0, trajectory_timeout_seconds=60)


def config_of(url: str, *, timeout_seconds: float = 5) -> RunConfig:
    user = SimulatedUser(
        user_strategy="llm", user_model="m", base_url=url, timeout_seconds=timeout_seconds
    )
    return RunConfig(environment=Environment(user=user))


async def test_the_model_gets_the_scenario_and_the_reversed_roles_and_its_tokens_count() -> None:
    async with user_endpoint("I want more data.", "It is 4711.", "###STOP###") as endpoint:
        user = build_user_factory(config_of(endpoint.url))(SCENARIO, "s")
        first = await user.open()
        second = await user.reply("Your PIN?")
        last = await user.reply("Done.")
        await user.aclose()
    assert (first.text, first.is_done) == ("I want more data.", False)
    assert (second.n_prompt_tokens, second.n_sampled_tokens) == (7, 3)
    assert (last.text, last.is_done, last.failure) == ("", True, None)
    system, *others = endpoint.requests[-1]["messages"]
    assert "My PIN is 4711." in system["content"]
    assert "No, make it Max." in system["content"]
    assert [one["role"] for one in others] == ["user", "assistant", "user", "assistant", "user"]
    assert others[-1]["content"] == "Done."


async def test_a_failing_user_makes_the_grade_unknown_and_is_counted() -> None:
    tasks = generate_world_tasks("telecom", split="all", count=2)
    async with user_endpoint("Hello.", "How can I help you today?") as endpoint:
        open_env = env_factory(config_of(endpoint.url))
        groups = await collect(
            tasks, open_env, oracle_policy, LIMITS, n_samples=2, max_concurrent=4
        )
    episodes = [one for group in groups for one in group.trajectories]
    assert [one.grade for one in episodes] == [None] * 4
    assert {one.failure.kind for one in episodes if one.failure} == {"UserFailedError"}
    assert episodes[0].failure is not None
    assert "broke_character" in episodes[0].failure.detail
    metrics = episode_metrics(groups)
    assert metrics["environment/telecom/user_failures"] == 4.0
    assert metrics["environment/telecom/user_failures_broke_character"] == 4.0
    # Per episode the opening and one reply.
    assert metrics["environment/telecom/user_prompt_tokens"] == 4 * 2 * 7
    assert metrics["environment/telecom/user_sampled_tokens"] == 4 * 2 * 3


async def test_an_endpoint_that_dies_costs_one_recorded_episode_each() -> None:
    tasks = generate_world_tasks("doordash", split="all", count=4)
    n_tasks_before = len(asyncio.all_tasks())
    async with user_endpoint("Yes, that is right.", dies_after=5) as endpoint:
        open_env = env_factory(config_of(endpoint.url, timeout_seconds=0.5))
        groups = await collect(
            tasks, open_env, oracle_policy, LIMITS, n_samples=1, max_concurrent=4
        )
    episodes = [group.trajectories[0] for group in groups]
    assert len(episodes) == 4
    failed = [one for one in episodes if one.failure is not None]
    assert failed
    for one in failed:
        assert one.grade is None
        assert one.failure is not None
        assert one.failure.kind == "UserFailedError"
        assert "(endpoint)" in one.failure.detail or "(timeout)" in one.failure.detail
    assert len(asyncio.all_tasks()) == n_tasks_before


async def test_users_of_different_episodes_have_different_seeds() -> None:
    async with user_endpoint("Hello.") as endpoint:
        make_user = build_user_factory(config_of(endpoint.url))
        for session in ("a", "b"):
            user = make_user(SCENARIO, session)
            await user.open()
            await user.aclose()
    first, second = (request["seed"] for request in endpoint.requests)
    assert first != second
