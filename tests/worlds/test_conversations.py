"""Conversational worlds: references pass with every kind of user, nothing else does; what is trained."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skyfleet.chat.message import Message
from skyfleet.chat.renderers import make_renderer
from skyfleet.cli.worlds import worlds_app
from skyfleet.curation.inspection import open_inspectable
from skyfleet.curation.replay import mutate_message
from skyfleet.curation.validate import validate
from skyfleet.curation.verdict import open_journal
from skyfleet.envs.tool_turns import RESPOND_NAME
from skyfleet.envs.users.scenario import Scenario, read_scenario
from skyfleet.envs.users.scripted import GOODBYE, RuleBasedUser, ScriptedUser
from skyfleet.errors import ConfigError
from skyfleet.models.tiny import train_tokenizer
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.random_agent import random_policy
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy, reference_policy
from skyfleet.tasks.rows import to_row
from skyfleet.tasks.task import RecordedCall, Task
from skyfleet.trajectories.trajectory import Trajectory
from skyfleet.worlds.catalog import (
    CONVERSATION_NAMES,
    generate_world_tasks,
    get_world,
    open_world,
    tasks_from_source,
)
from skyfleet.worlds.conversations.world import ConversationWorld

LIMITS = Limits(max_turns=40, max_input_length=1_000_000, trajectory_timeout_seconds=60)
every_domain = pytest.mark.parametrize("name", CONVERSATION_NAMES)
every_user = pytest.mark.parametrize("kind", [ScriptedUser, RuleBasedUser])


async def play(task: Task, kind: type[RuleBasedUser] = ScriptedUser) -> Trajectory:
    def make_user(scenario: Scenario, session: str) -> RuleBasedUser:
        return kind(scenario)

    return await run_episode(task, partial(open_world, make_user=make_user), oracle_policy, LIMITS)


def tasks_of_every_template(name: str) -> list[Task]:
    return generate_world_tasks(name, split="all", count=2 * len(get_world(name).templates))


def respond(task: Task, *texts: str) -> Task:
    """The task with a reference that only says these messages."""
    calls = tuple(RecordedCall(name=RESPOND_NAME, arguments={"content": one}) for one in texts)
    return task.model_copy(update={"solution": calls})


@every_domain
def test_a_domain_has_tools_tables_rules_and_templates_of_three_difficulties(name: str) -> None:
    world = get_world(name)
    assert isinstance(world, ConversationWorld)
    assert 10 <= len(world.toolkit.specs) <= 15
    app = world.open(4, {})
    tables = app.db.column("select name from sqlite_master where type = 'table'")
    app.db.close()
    assert len(tables) >= 8
    assert len(world.rules) >= 10
    assert all(f"{number}. {text}" in world.policy for number, text in world.rules.items())
    assert len(world.templates) >= 12
    assert {template.difficulty for template in world.templates} == {1, 2, 3}
    assert any(template.held_out for template in world.templates)


@every_domain
def test_domains_have_refusals_changes_of_mind_and_several_facts(name: str) -> None:
    tasks = tasks_of_every_template(name)
    refusals = [task for task in tasks if task.metadata.get("required_replies", {}).get("rules")]
    changing = [task for task in tasks if read_scenario(task).changes_of_mind]
    assert len({task.metadata["template"] for task in refusals}) >= 6
    assert len({task.metadata["template"] for task in changing}) >= 1
    assert any(len(read_scenario(task).facts) >= 4 for task in tasks)


@every_domain
@every_user
async def test_references_pass_and_every_answer_is_the_one_that_was_asked_for(
    name: str, kind: type[RuleBasedUser]
) -> None:
    for task in tasks_of_every_template(name):
        episode = await play(task, kind)
        assert episode.success, (task.key, episode.failure, episode.grade)
        n_errors = sum(m.is_error for turn in episode.turns for m in turn.replies)
        assert n_errors == task.metadata["expected_errors"], task.key
        assert episode.messages[-1].text == GOODBYE, task.key
        scenario = read_scenario(task)
        user_texts = " ".join(m.text for m in episode.messages if m.role == "user")
        for text in (*scenario.changes_of_mind, *scenario.objections):
            assert text in user_texts, task.key


@every_domain
async def test_every_argument_of_a_reference_was_asked_or_looked_up(name: str) -> None:
    """With a rule-based user, who reveals a fact only when it is asked for it."""
    world = get_world(name)
    choices = str([spec.parameters for spec in world.toolkit.specs])
    for task in tasks_of_every_template(name):
        computed = r"\d+"  # a credit, a refund or a number of items, which the rules imply
        known = choices
        for message in (await play(task, RuleBasedUser)).messages:
            for call in message.tool_calls:
                for value in call.arguments.values():
                    if not re.fullmatch(computed, str(value)) or isinstance(value, str):
                        assert re.search(rf"\b{re.escape(str(value))}\b", known), (task.key, call)
            known += f" {message.text}"


@every_domain
async def test_doing_nothing_and_random_calls_score_zero(name: str) -> None:
    for task in tasks_of_every_template(name):
        for agent in (null_policy, random_policy(seed=1)):
            episode = await run_episode(task, open_world, agent, LIMITS)
            assert episode.reward == 0.0, task.key


@every_domain
async def test_validation_finds_no_fault(name: str, tmp_path: Path) -> None:
    tasks = generate_world_tasks(name, split="all", count=len(get_world(name).templates) // 2)
    with open_journal(tmp_path / "journal", {}) as journal:
        verdicts = await validate({"good": tasks}, open_inspectable, journal=journal)
    assert [(one.task_key, one.reason, one.evidence) for one in verdicts if one.reason] == []


def _refusal(name: str) -> Task:
    tasks = generate_world_tasks(name, split="all", count=60)
    return next(task for task in tasks if task.metadata["template"] == "call_for_somebody_else")


async def test_a_refusal_scores_only_with_its_own_rule_and_no_other() -> None:
    task = _refusal("telecom")
    cases = [
        (("I cannot help you.", "No."), 0.0),
        (("Rule R2 forbids it.", "No."), 1.0),
        (("Rules R1, R2 and R3 forbid it.", "No."), 0.0),
        (("Rule R3 forbids it.", "No."), 0.0),
    ]
    for texts, reward in cases:
        assert (await play(respond(task, *texts))).reward == reward, texts


async def test_a_required_amount_counts_only_as_it_is_and_not_in_a_list_of_all() -> None:
    tasks = generate_world_tasks("telecom", split="all", count=60)
    task = next(one for one in tasks if one.metadata["template"] == "state_bill")
    *asked, last = task.solution
    amount, due = task.metadata["required_replies"]["values"]

    async def reward(text: str) -> float | None:
        answered = RecordedCall(name=RESPOND_NAME, arguments={"content": text})
        return (await play(task.model_copy(update={"solution": (*asked, answered)}))).reward

    assert last.name == RESPOND_NAME
    assert await reward(f"It is {amount}, due on {due}.") == 1.0
    assert await reward(f"It is 1{amount}, due on {due}.") == 0.0
    assert await reward(f"It is {amount}1, due on {due}.") == 0.0
    assert await reward(f"Due on {due}.") == 0.0
    every_amount = ", ".join(f"${n}.00" for n in range(7))
    assert await reward(f"{every_amount}, {amount}, due on {due}") == 0.0


async def test_text_beside_a_tool_call_is_no_reply_to_the_user() -> None:
    (task,) = generate_world_tasks("telecom", split="all", count=1)
    env = await open_world(task)
    await env.reset()
    step = await env.step(
        Message(role="assistant", content="Your bill is $1.00.", malformed_calls=("{",))
    )
    assert step.messages[0].text.startswith("Error: the tool call")
    assert [m.text for m in env._conversation() if m.role == "assistant"] == []
    await env.close()


@pytest.mark.parametrize(
    ("text", "is_done"), [("", False), ("  ", False), ("<done>", True), ("Bye. <done>", True)]
)
async def test_an_empty_message_is_reported_and_done_ends_the_episode(
    text: str, is_done: bool
) -> None:
    (task,) = generate_world_tasks("doordash", split="all", count=1)
    env = await open_world(task)
    await env.reset()
    step = await env.step(Message(role="assistant", content=text))
    assert step.done == is_done
    assert (await env.grade()).reward == 0.0
    await env.close()
    await env.close()


async def test_only_what_the_agent_writes_is_trained() -> None:
    renderer = make_renderer(train_tokenizer([], vocab_size=0))
    (task,) = generate_world_tasks("healthcare", split="all", count=1)
    episode = await run_episode(task, open_world, reference_policy(renderer), LIMITS)
    assert episode.success
    (transcript,) = episode.transcripts
    written = [token for turn in episode.turns for token in renderer.render_completion(turn.action)]
    pairs = list(zip(transcript.token_ids, transcript.loss_mask, strict=True))
    assert [token for token, is_trained in pairs if is_trained] == written
    prompt_text = renderer.text([token for token, is_trained in pairs if not is_trained])
    users = [m.text for m in episode.messages[:-1] if m.role == "user"]
    assert len(users) >= 3
    assert all(text in prompt_text for text in users)


@every_domain
def test_generation_depends_on_the_seed_alone_and_keeps_splits_apart(name: str) -> None:
    again = [tasks_from_source(f"world:{name}?count=30&seed=5") for _ in range(2)]
    assert again[0] == again[1]
    other = tasks_from_source(f"world:{name}?count=30&seed=6")
    unseen = tasks_from_source(f"world:{name}?count=10&split=unseen_templates")
    keys = {task.key for task in again[0]}
    assert not keys & {task.key for task in other}
    trained = {task.metadata["template"] for task in again[0]}
    assert not trained & {task.metadata["template"] for task in unseen}


async def test_a_task_survives_its_file_and_is_graded_in_the_jail_alike() -> None:
    (task,) = generate_world_tasks("doordash", split="all", count=1)
    stored = Task.model_validate_json(json.dumps(to_row(task)))
    assert stored == task
    edited = stored.model_copy(update={"verifier_code": f"{stored.verifier_code}\n# from a file\n"})
    for one in (stored, edited):
        episode = await play(one)
        assert (episode.reward, episode.failure) == (1.0, None)
        idle = await run_episode(one, open_world, null_policy, LIMITS)
        assert idle.reward == 0.0


def test_a_mutated_message_states_other_numbers_or_nothing() -> None:
    assert mutate_message("It is $9.50, see R4.") == "It is $10.51, see R5."
    assert mutate_message("It is done.") == "zorqua"


def test_conversations_are_not_served_in_one_sentence() -> None:
    result = CliRunner().invoke(worlds_app, ["serve", "world:telecom?count=1", "--dry-run"])
    assert isinstance(result.exception, ConfigError)
    assert "skyfleet rollout" in str(result.exception)


def test_the_page_names_every_template_with_its_difficulty_and_the_counts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conversations.md").read_text()
    for name in CONVERSATION_NAMES:
        world = get_world(name)
        held_out = sum(template.held_out for template in world.templates)
        assert f"| {len(world.templates)} ({held_out}) |" in page
        rows = page.partition(f"| `{name}` | 1 |")[2].splitlines()[:3]
        for difficulty, row in enumerate(rows, start=1):
            names = {one.name for one in world.templates if one.difficulty == difficulty}
            assert set(re.findall(r"`(\w+)`", row)) == names


@pytest.mark.exhaustive
@every_domain
@pytest.mark.parametrize("seed", [0, 1])
async def test_a_thousand_tasks_are_distinct_and_without_fault(
    name: str, seed: int, tmp_path: Path
) -> None:
    tasks = generate_world_tasks(name, split="all", count=1000, seed=seed)
    assert len({task.key for task in tasks}) == 1000
    with open_journal(tmp_path / "journal", {}) as journal:
        verdicts = await validate({"good": tasks}, open_inspectable, journal=journal)
    assert [(one.task_key, one.reason, one.evidence) for one in verdicts if one.reason] == []
