"""Tasks of every world: the reference solution passes, doing nothing fails, episodes are short."""

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
from skyfleet.worlds import catalog, vocabulary
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks, get_world, tasks_from_source
from skyfleet.worlds.env import WorldEnv

every_world = pytest.mark.parametrize("name", WORLD_NAMES)


@cache
def all_tasks(name: str) -> list[Task]:
    return generate_world_tasks(name, split="all", count=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    grade: Grade
    texts: list[str]
    errors: int


async def _play_all(name: str) -> list[tuple[Task, Episode]]:
    """Every task with the episode of its reference solution, which three tests look at."""
    if name not in _played:
        _played[name] = [(task, await _play(task)) for task in all_tasks(name)]
    return _played[name]


_played: dict[str, list[tuple[Task, Episode]]] = {}


async def _play(task: Task, *, idle: bool = False) -> Episode:
    env = WorldEnv(get_world(task.env_key), task)
    observation = await env.reset()
    texts = [message.text for message in observation.messages]
    texts += [
        f"{t.name}({', '.join(t.parameters['properties'])}) {t.description}"
        for t in observation.tools
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
    return Episode(grade=grade, texts=texts, errors=errors)


def _is_counted(task: Task) -> bool:
    """The answer is a sum or a count, which no tool returns."""
    return re.search("How (many|much)|Count|total", task.prompt) is not None


def _tokens(texts: list[str]) -> int:
    return sum(len(re.findall(r"\w+|[^\w\s]+", text)) for text in texts)


@every_world
async def test_the_reference_solution_passes_and_doing_nothing_fails(name: str) -> None:
    for task, played in await _play_all(name):
        assert played.grade.success, (task.key, played.grade.explanation)
        assert not (await _play(task, idle=True)).grade.success, task.key


@every_world
async def test_every_argument_of_a_solution_can_be_looked_up(name: str) -> None:
    choices = str([spec.parameters for spec in get_world(name).toolkit.specs])
    for task, played in await _play_all(name):
        known = ""
        _system, *texts = played.texts
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
    lengths = [_tokens(played.texts) for _, played in await _play_all(name)]
    assert statistics.median(lengths) <= 260
    assert max(lengths) <= 700
    assert max(len(task.prompt.split()) for task in tasks) <= 60
    assert max(len(task.solution) for task in tasks) <= 9


@every_world
async def test_every_world_has_lookup_question_and_error_recovery_tasks(name: str) -> None:
    tasks = generate_world_tasks(name, split="train", count=120)
    assert {task.difficulty for task in tasks} == {1, 2, 3}
    assert any(task.solution[-1].name == "submit_final_answer" for task in tasks)
    for task in tasks:
        if (await _play(task)).errors:
            break
    else:
        pytest.fail("no reference solution recovers from an error")
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
    train = generate_world_tasks(name, split="train", count=4 * len(trained))
    drawn = [task.metadata["template"] for task in train]
    assert set(drawn) == trained
    assert {drawn.count(template) for template in drawn} == {4}
    unseen = generate_world_tasks(name, split="unseen_templates", count=12)
    assert {task.metadata["template"] for task in unseen} == held_out


@every_world
def test_splits_share_no_task_whatever_the_seed(name: str) -> None:
    train = generate_world_tasks(name, split="train", count=60, seed=0)
    unseen = generate_world_tasks(name, split="unseen_tasks", count=20, seed=1)
    held_out = generate_world_tasks(name, split="unseen_templates", count=20, seed=0)
    keys = [task.key for task in train + unseen + held_out]
    assert len(keys) == len(set(keys)) == 100
    instructions = {(task.prompt, task.data_key) for task in train + unseen + held_out}
    assert len(instructions) == 100


@every_world
def test_data_of_different_families_shares_no_names(name: str) -> None:
    def names(data_seed: int) -> set[str]:
        """All stored two-word texts, except remarks, which all families share."""
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
        return pairs - set(vocabulary.REMARKS)

    assert names(0)
    assert not names(0) & names(1)
    assert names(0) & names(vocabulary.FAMILIES)


@every_world
def test_some_tools_write_and_some_only_read(name: str) -> None:
    world = get_world(name)
    assert world.toolkit.writing
    assert world.toolkit.writing < {spec.name for spec in world.toolkit.specs}


def test_no_two_worlds_have_a_tool_of_the_same_name() -> None:
    names = [spec.name for name in WORLD_NAMES for spec in get_world(name).toolkit.specs]
    assert len(names) == len(set(names))


@every_world
def test_tasks_depend_on_the_seed_and_not_on_the_count(name: str) -> None:
    few = generate_world_tasks(name, split="train", count=10, seed=3)
    assert generate_world_tasks(name, split="train", count=25, seed=3)[:10] == few
    assert generate_world_tasks(name, split="train", count=10, seed=4) != few
    assert re.fullmatch(rf"{name}-[a-z_]+-[0-9a-f]{{8}}", few[0].key)
    assert len({task.data_key for task in few}) > 5


def test_a_source_address_generates_its_tasks() -> None:
    named = tasks_from_source("world:github?split=unseen_tasks&count=5&seed=2")
    assert named == generate_world_tasks("github", split="unseen_tasks", count=5, seed=2)
    assert tasks_from_source("world:booking?count=3") == generate_world_tasks(
        "booking", split="train", count=3
    )


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("world:gihub?count=3", "'gihub' is unknown; did you mean github?"),
        ("world:xyz?count=3", "choose from booking, github, outlook"),
        ("world:github?cuont=3", "'cuont' is unknown; did you mean count?"),
        ("world:github?count=many", "count='many'; write a whole number of at least 1"),
        ("world:github?count=0", "count='0'"),
        (
            "world:github?count=100000",
            "count=100000 is above the limit of 20,000; generate more with another seed",
        ),
        ("world:github", "count is missing: write world:github?count=100"),
        ("world:github?count=3&seed=-1", "seed='-1'; write a whole number of at least 0"),
        ("world:github?count=3&split=test", "split='test'"),
        ("github.json", "is not a world address; write world:<name>"),
    ],
)
def test_an_invalid_source_address_names_the_remedy(source: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        tasks_from_source(source)
    assert complaint in str(error.value)


def test_a_count_above_the_available_tasks_names_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "_MAX_MISSES", 0)
    with pytest.raises(
        ConfigError, match=r"count=100000, but split=unseen_templates has \d+ tasks; lower"
    ):
        generate_world_tasks("zillow", split="unseen_templates", count=100_000)


def test_max_difficulty_limits_the_tasks() -> None:
    easy = tasks_from_source("world:github?count=40&max_difficulty=1")
    assert {task.difficulty for task in easy} == {1}


def test_nearly_every_task_has_its_own_database() -> None:
    """Repeated answers could be memorized instead of looked up."""
    tasks = generate_world_tasks("booking", split="train", count=100)
    assert len({task.data_key for task in tasks}) > 97


@every_world
def test_no_prompt_with_the_same_solution_is_in_both_train_and_unseen_tasks(name: str) -> None:
    def instructions(split: Literal["train", "unseen_tasks"]) -> set[str]:
        tasks = generate_world_tasks(name, split=split, count=60, max_difficulty=1)
        return {f"{task.prompt} {task.solution}" for task in tasks}

    assert not instructions("train") & instructions("unseen_tasks")
