"""Every task of every world can be done, is not done by doing nothing, and is short."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from functools import cache
from typing import Literal

import pytest

from skyfleet.chat.message import Message, ToolCall
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Grade, Task
from skyfleet.worlds import catalog
from skyfleet.worlds import vocabulary as wording
from skyfleet.worlds.catalog import WORLD_NAMES, get_world, tasks_from_source, world_tasks
from skyfleet.worlds.env import WorldEnv

every_world = pytest.mark.parametrize("name", WORLD_NAMES)


@cache
def all_tasks(name: str) -> list[Task]:
    return world_tasks(name, split="all", count=200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    grade: Grade
    texts: list[str]
    errors: int


async def _play(task: Task, *, idle: bool = False) -> Played:
    env = WorldEnv(get_world(task.env_key), task)
    opening = await env.reset()
    texts = [message.text for message in opening.messages]
    texts += [
        f"{t.name}({', '.join(t.parameters['properties'])}) {t.description}" for t in opening.tools
    ]
    done, errors = False, 0
    for number, call in enumerate(() if idle else task.solution):
        made = ToolCall(id=str(number), name=call.name, arguments=call.arguments)
        step = await env.step(Message(role="assistant", tool_calls=(made,)))
        texts.append(f"<tool_call>{json.dumps(call.model_dump())}</tool_call>")
        texts += [message.text for message in step.messages]
        errors += sum(message.is_error for message in step.messages)
        done = step.done
    if not done:
        await env.step(Message(role="assistant", content="<done>"))
        texts.append("<done>")
    grade = await env.grade()
    await env.close()
    return Played(grade=grade, texts=texts, errors=errors)


def _is_counted(task: Task) -> bool:
    """The answer is a sum or a number of things, which nobody has to have said before."""
    return re.search("How (many|much)|Count|total", task.prompt) is not None


def _tokens(texts: list[str]) -> int:
    return sum(len(re.findall(r"\w+|[^\w\s]+", text)) for text in texts)


@every_world
async def test_the_reference_solution_passes_and_doing_nothing_fails(name: str) -> None:
    for task in all_tasks(name):
        played = await _play(task)
        assert played.grade.success, (task.key, played.grade.explanation)
        assert not (await _play(task, idle=True)).grade.success, task.key


@every_world
async def test_nothing_in_a_solution_has_to_be_guessed(name: str) -> None:
    choices = str([spec.parameters for spec in get_world(name).toolkit.specs])
    for task in all_tasks(name):
        known = ""
        _system, *texts = (await _play(task)).texts
        for text in texts:
            if not text.startswith("<tool_call>"):
                known += f" {text}"
                continue
            call = json.loads(text[len("<tool_call>") : -len("</tool_call>")])
            if call["name"] == "submit_final_answer" and _is_counted(task):
                continue
            for value in call["arguments"].values():
                assert re.search(rf"\b{value}\b", known + choices), (task.key, text)


@every_world
async def test_episodes_are_short_enough_for_a_small_model(name: str) -> None:
    tasks = all_tasks(name)
    lengths = [_tokens((await _play(task)).texts) for task in tasks]
    assert statistics.median(lengths) <= 260
    assert max(lengths) <= 700
    assert max(len(task.prompt.split()) for task in tasks) <= 60
    assert max(len(task.solution) for task in tasks) <= 9


@every_world
async def test_a_world_asks_for_reading_for_answers_and_for_heeding_errors(name: str) -> None:
    tasks = world_tasks(name, split="train", count=200)
    assert {task.difficulty for task in tasks} == {1, 2, 3}
    assert any(task.solution[-1].name == "submit_final_answer" for task in tasks)
    played = [await _play(task) for task in tasks]
    assert any(one.errors for one in played)
    reads = [task for task in tasks if re.match("list_|get_", task.solution[0].name)]
    assert len(reads) > 0.7 * len(tasks)


@every_world
def test_a_world_has_few_tools_with_few_parameters_and_short_descriptions(name: str) -> None:
    specs = get_world(name).toolkit.specs
    assert 5 <= len(specs) <= 8
    for spec in specs:
        assert len(spec.parameters["properties"]) <= 4
        assert 0 < len(spec.description.split()) <= 8
        for schema in spec.parameters["properties"].values():
            assert schema.keys() <= {"type", "enum", "description", "minimum", "maximum"}


@every_world
def test_templates_are_balanced_and_some_are_never_trained_on(name: str) -> None:
    templates = get_world(name).templates
    held_out = {template.name for template in templates if template.held_out}
    assert len(templates) >= 6
    assert len(held_out) >= 2
    trained = {template.name for template in templates} - held_out | {"two_errands"}
    train = world_tasks(name, split="train", count=10 * len(trained))
    drawn = [task.metadata["template"] for task in train]
    assert set(drawn) == trained
    assert {drawn.count(template) for template in drawn} == {10}
    unseen = world_tasks(name, split="unseen_templates", count=30)
    assert {task.metadata["template"] for task in unseen} == held_out


@every_world
def test_splits_share_no_task_whatever_the_seed(name: str) -> None:
    train = world_tasks(name, split="train", count=150, seed=0)
    unseen = world_tasks(name, split="unseen_tasks", count=50, seed=1)
    held_out = world_tasks(name, split="unseen_templates", count=50, seed=0)
    keys = [task.key for task in train + unseen + held_out]
    assert len(keys) == len(set(keys)) == 250
    wishes = {(task.prompt, task.data_key) for task in train + unseen + held_out}
    assert len(wishes) == 250


@every_world
def test_data_of_another_family_has_other_names(name: str) -> None:
    def names(data_seed: int) -> set[str]:
        """Everything stored that is two words, save remarks, which anyone may make."""
        world = get_world(name)
        app = world.open(data_seed, world.variables(data_seed))
        tables = app.db.column("select name from sqlite_master where type = 'table'")
        cells = [
            c
            for table in tables
            for row in app.db.rows(f'select * from "{table}"')
            for c in row.values()
        ]
        app.db.close()
        pairs = {cell for cell in cells if isinstance(cell, str) and re.fullmatch(r"\w+ \w+", cell)}
        return pairs - set(wording.REMARKS)

    assert names(0)
    assert not names(0) & names(1)
    assert names(0) & names(wording.FAMILIES)


@every_world
def test_some_tools_write_and_some_only_read(name: str) -> None:
    world = get_world(name)
    assert world.toolkit.writing
    assert world.toolkit.writing < {spec.name for spec in world.toolkit.specs}


def test_no_two_worlds_have_a_tool_of_the_same_name() -> None:
    names = [spec.name for name in WORLD_NAMES for spec in get_world(name).toolkit.specs]
    assert len(names) == len(set(names))


@every_world
def test_tasks_depend_on_the_seed_and_not_on_how_many_are_drawn(name: str) -> None:
    few = world_tasks(name, split="train", count=20, seed=3)
    assert world_tasks(name, split="train", count=50, seed=3)[:20] == few
    assert world_tasks(name, split="train", count=20, seed=4) != few
    assert re.fullmatch(rf"{name}-[a-z_]+-[0-9a-f]{{8}}", few[0].key)
    assert len({task.data_key for task in few}) > 5


def test_a_source_names_its_tasks() -> None:
    named = tasks_from_source("world:github?split=unseen_tasks&count=5&seed=2")
    assert named == world_tasks("github", split="unseen_tasks", count=5, seed=2)
    assert tasks_from_source("world:booking?count=3") == world_tasks(
        "booking", split="train", count=3
    )


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("world:gihub?count=3", "'gihub' is unknown; did you mean github?"),
        ("world:xyz?count=3", "choose from booking, github, outlook"),
        ("world:github?cuont=3", "'cuont' is unknown; did you mean count?"),
        ("world:github?count=many", "count='many'; write a whole number from 1 up"),
        ("world:github?count=0", "count='0'"),
        ("world:github?count=100000", "count=100000; at most 20,000, more by another seed"),
        ("world:github", "count=''"),
        ("world:github?count=3&seed=-1", "seed='-1'; write a whole number from 0 up"),
        ("world:github?count=3&split=test", "split='test'"),
        ("github.json", "names no world; write world:<name>"),
    ],
)
def test_a_source_that_names_nothing_says_what_would(source: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        tasks_from_source(source)
    assert complaint in str(error.value)


def test_asking_for_more_tasks_than_there_are_says_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "_MISSES", 0)
    with pytest.raises(ConfigError, match=r"count=100000, but split=unseen_templates has \d+$"):
        world_tasks("zillow", split="unseen_templates", count=100_000)


def test_a_source_may_keep_to_easy_tasks() -> None:
    easy = tasks_from_source("world:github?count=40&max_difficulty=1")
    assert {task.difficulty for task in easy} == {1}


def test_nearly_every_task_has_data_of_its_own() -> None:
    """Answers that repeat would be remembered, not looked up."""
    tasks = world_tasks("booking", split="train", count=300)
    assert len({task.data_key for task in tasks}) > 290


@every_world
def test_no_wish_with_the_same_solution_is_both_trained_on_and_unseen(name: str) -> None:
    def wishes(split: Literal["train", "unseen_tasks"]) -> set[str]:
        tasks = world_tasks(name, split=split, count=200, max_difficulty=1)
        return {f"{task.prompt} {task.solution}" for task in tasks}

    assert not wishes("train") & wishes("unseen_tasks")
