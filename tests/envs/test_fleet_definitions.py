"""Verifiers that fleet-python loads in this process only define functions."""

from __future__ import annotations

import json
import re

import pytest
from tests.envs.test_fleet_parity import FLEET_TASKS, has_fleet_tasks

from skyfleet.envs.fleet.definitions import strip_to_definitions
from skyfleet.errors import VerifierError
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks

# A string that is closed on a line which the SDK removes: without the line it ends elsewhere.
REOPENED = '''def verify(env): pass
x = """
from fleet import verifier """
y = """
open("escaped", "w")
z = """
"""
'''


@pytest.mark.parametrize(
    "code",
    [
        "open('escaped', 'w')\ndef verify(env): pass",
        "def verify(env, x=open('escaped', 'w')): pass",
        "def verify(env, *, x=open('escaped', 'w')): pass",
        "def verify(env: open('escaped', 'w')): pass",
        "def verify(env, *args: open('escaped', 'w')): pass",
        "def verify(env) -> open('escaped', 'w'): pass",
        "@open('escaped', 'w').write\ndef verify(env): pass",
        "class A:\n    open('escaped', 'w')\ndef verify(env): pass",
        "x = open('escaped', 'w')\ndef verify(env): pass",
        "x: open('escaped', 'w') = 1\ndef verify(env): pass",
        "if open('escaped', 'w'): pass\ndef verify(env): pass",
        "async def verify(env, x=[open('escaped', 'w')]): pass",
        "import antigravity\ndef verify(env): pass",
        "from . import helper\ndef verify(env): pass",
        "def verify(env: 9 ** 9 ** 9): pass",
        "x = 1; @verifier(key='a')\ndef verify(env): pass",
        "def verify(env): pass\nx = '@verifier()'",
        REOPENED,
    ],
)
def test_source_that_runs_code_when_it_is_loaded_is_refused(code: str) -> None:
    with pytest.raises(VerifierError, match=r"allow_unconfined=true|cannot be parsed"):
        strip_to_definitions(code)


def test_definitions_are_accepted_without_fleets_imports_and_decorator() -> None:
    code = (
        '"""Doc."""\nfrom fleet import verifier\nimport json\nLIMITS = {"a": [1, -2]}\n'
        '@verifier(\n  key="k",\n)\nasync def verify(env: Environment, a: str | None = None) -> int:\n'
        "    return json.loads(a)\n"
    )
    expected = re.sub(r"from fleet.*\n|@verifier\([^)]*\)\n", "", code)
    assert strip_to_definitions(code) == expected
    for world in WORLD_NAMES:
        for task in generate_world_tasks(world, split="all", count=3):
            assert strip_to_definitions(task.verifier_code or "") == task.verifier_code


@has_fleet_tasks
def test_all_of_fleets_public_verifiers_are_accepted() -> None:
    for row in json.loads(FLEET_TASKS.read_text()):
        assert strip_to_definitions(row["verifier_func"]) == row["verifier_func"]
