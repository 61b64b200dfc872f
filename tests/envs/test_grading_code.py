"""A change of the code that plays or grades is found; comments, caches and positions are none."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from tests.envs import graders

import skyfleet as sf
from skyfleet.api.envs import resolve_env
from skyfleet.config.loading import load_config
from skyfleet.envs.grading_code import GradingCode, find_grading_code
from skyfleet.envs.registry import find_run_code


def hash_source(source: str, name: str = "reward") -> Mapping[str, str]:
    """The hashes of a user's module, of which `name` is the reward or the environment."""
    values: dict[str, Any] = {"__name__": "__main__", "sf": sf}
    exec(compile(textwrap.dedent(source), "<user>", "exec"), values)
    return hash_given(values[name])


def hash_given(given: Any) -> Mapping[str, str]:
    is_reward = callable(given) and not isinstance(given, type)
    env, reward = (None, given) if is_reward else (given, None)
    opened = resolve_env(env, reward, where="test", default_name=None).open_env
    found = find_grading_code(opened)
    assert found is not None
    return found.hashes


BASE = """
import re
THRESHOLDS = {"easy": 1, "hard": [2, 3]}
PATTERN = re.compile("[0-9]+")
CACHE, SEEN, CALLS = {}, [], 0
def helper(answer, least=1, memo={}):
    global CALLS
    CALLS += 1
    memo[answer] = len(answer)
    CACHE[answer] = CACHE.get(answer, 0)
    CACHE[answer] += 1
    SEEN.append(answer)
    return len(answer) >= least and any(word in answer for word in {"a", "b", "c"})
GRADERS = {"long": helper}
def reward(task, answer):
    "Grade an answer."
    kind = task["kind"]
    if PATTERN.match(answer) and len(answer) > THRESHOLDS["easy"]:
        return float(GRADERS[kind](answer))
    return 0.0
"""


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return 0.0", "return 1.0", ["reward"]),
        ("len(answer) > ", "len(answer) >= ", ["reward"]),
        ('"hard": [2, 3]', '"hard": [2, 4]', ["THRESHOLDS"]),
        ("[0-9]+", "[0-9]*", ["PATTERN"]),
        ("least=1", "least=2", ["helper(least)"]),
        ('{"a", "b", "c"}', '{"a", "b", "d"}', ["helper"]),
        ('"long": helper', '"long": len', ["GRADERS", "helper", "helper(least)"]),
        ('task["kind"]', 'task["style"]', ["reward"]),
    ],
)
def test_changed_code_and_values_are_found_and_named(
    old: str, new: str, changed: list[str]
) -> None:
    assert old in BASE
    before, after = hash_source(BASE), hash_source(BASE.replace(old, new))
    assert GradingCode(hashes=before).find_changes(GradingCode(hashes=after)) == changed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return 0.0", "    # nothing\n\n    return (0.0)"),
        ("Grade an answer.", "Grade."),
        ("kind", "k"),
        ("{}, [], 0", "{'x': 1}, [2], 3"),
        ("memo={}", "memo={1: 2}"),
        ('{"a", "b", "c"}', '{"c", "b", "a"}'),
        ('THRESHOLDS = {"easy": 1, "hard": [2, 3]}', 'THRESHOLDS = {"hard": [2, 3], "easy": 1}'),
        ("import re", "import re\nUNUSED = 3\ndef unused(): return 4"),
    ],
)
def test_comments_docstrings_local_names_caches_and_unused_code_do_not_count(
    old: str, new: str
) -> None:
    assert old in BASE
    edited = BASE.replace('task["kind"]', "task[0]")
    assert hash_source(edited) == hash_source(edited.replace(old, new))


ENV = """
class Base(sf.Env):
    least = 1
    def grade(self): return float(self.n >= self.least)
class Room(Base):
    def __init__(self, task): self.n = 0
    def reset(self): return sf.Observation("Go.", tools=[self.go])
    def go(self, steps: int) -> str:
        "Walk."
        self.n += steps
        return "done"
class Other: pass
room = Room(None)
tool_env = sf.ToolEnv(tools=[], setup=lambda task: {}, reward=lambda answer: 1.0)
"""


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    [
        ("Room", "least = 1", "least = 2", ["Base.least"]),
        ("Room", ">= self", "> self", ["Base.grade"]),
        ("Room", "Walk.", "Run.", ["Room.go"]),
        ("room", '"done"', '"ok"', ["Room.go"]),
        ("room", "class Other: pass", "", []),
        ("tool_env", "answer: 1.0", "answer: 0.0", ["reward"]),
        ("tool_env", "task: {}", "task: []", ["setup"]),
    ],
)
def test_classes_with_their_bases_and_tools_are_compared(
    name: str, old: str, new: str, changed: list[str]
) -> None:
    before, after = hash_source(ENV, name), hash_source(ENV.replace(old, new), name)
    assert GradingCode(hashes=before).find_changes(GradingCode(hashes=after)) == changed


def by_global(answer: str) -> float:
    return float(graders.is_short(answer))


def by_import(answer: str) -> float:
    import tests.envs.graders as module

    return float(module.is_short(answer))


def by_package(answer: str) -> float:
    import tests.envs.graders

    return float(tests.envs.graders.is_short(answer))


def by_name(answer: str) -> float:
    from tests.envs.graders import is_short

    return float(is_short(answer))


def score(answer: str, least: int) -> float:
    return float(len(answer) > least)


def make_closure(least: int) -> Callable[..., float]:
    return lambda answer: score(answer, least)


class Grader:
    def __init__(self, least: int, folder: str = "") -> None:
        self.least, self.n_calls, self.folder = least, least, folder

    def __call__(self, answer: str) -> float:
        self.n_calls += 1
        return self.grade(answer)

    def grade(self, answer: str) -> float:
        return score(answer, self.least)

    def save(self) -> str:
        return self.folder


@pytest.mark.parametrize("reward", [by_global, by_import, by_package, by_name])
def test_helpers_in_other_modules_are_followed(
    reward: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hash_given(reward)
    monkeypatch.setattr(graders, "LIMIT", 4)
    after = hash_given(reward)
    assert GradingCode(hashes=before).find_changes(GradingCode(hashes=after)) == ["LIMIT"]


@pytest.mark.parametrize("make", [make_closure, Grader, lambda n: partial(score, least=n)])
def test_closures_partials_and_callable_objects_are_compared_by_their_values(
    make: Callable[[int], Callable[..., float]],
) -> None:
    assert hash_given(make(1)) == hash_given(make(1)) != hash_given(make(2))
    grader = Grader(1)
    assert hash_given(grader.grade) != hash_given(Grader(2).grade)
    assert hash_given(grader.grade) == hash_given(Grader(1, folder="other").grade)
    before = hash_given(grader)
    grader("answer")
    assert hash_given(grader) == before


@pytest.mark.parametrize(
    "environment",
    [
        "env_class: 'tests.envs.graders:is_short'",
        "env_classes: {a: 'tests.envs.graders:is_short'}",
        "{env_class: mcp, mcp: {url: 'http://localhost', reward: 'tests.envs.graders:is_short'}}",
        "{env_class: skyrl_gym, skyrl_gym: {env_id: 'tests.envs.graders:is_short'}}",
    ],
)
def test_code_that_the_configuration_names_is_compared(environment: str) -> None:
    inline = environment if environment.startswith("{") else f"{{{environment}}}"
    found = find_run_code(load_config(f"environment: {inline}"), None)
    assert found is not None
    assert found.hashes.keys() == {"is_short", "LIMIT"}
    built_in = find_run_code(load_config(""), None)
    assert built_in == GradingCode(hashes={})


def test_an_object_that_cannot_be_looked_at_is_unknown() -> None:
    class Odd(ModuleType):
        @property
        def __name__(self) -> str:  # type: ignore[override]
            raise RuntimeError("no")

    values: dict[str, Any] = {"odd": Odd("odd")}
    exec("def reward(answer): return odd.grade(answer)", values)
    assert find_grading_code(values["reward"]) is None
    assert GradingCode(hashes={}, python="a").find_changes(GradingCode(hashes={"x": "1"})) == []
