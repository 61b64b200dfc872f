from __future__ import annotations

import pytest

from skyfleet.curation.validate import find_answer_in_prompt, find_duplicates
from skyfleet.curation.verdict import Reason
from skyfleet.tasks.task import RecordedCall, Task


def question(prompt: str, answer: str) -> Task:
    call = RecordedCall(name="submit_final_answer", arguments={"answer": answer})
    return Task(key="k", env_key="e", prompt=prompt, solution=(call,))


@pytest.mark.parametrize(
    ("prompt", "answer", "leaks"),
    [
        ("Who has it? (It is ANA Ruiz!)", "Ana Ruiz", True),
        ("Who has it?", "Ana Ruiz", False),
        ("Which banana?", "Ana", False),
        ("How many of the 4?", "4", False),
        ("What is the code? Not 123.", "123", True),
        ("Are pets allowed or forbidden?", "Forbidden", False),
        ("Are pets allowed or forbidden? Forbidden.", "forbidden", True),
        ("What?", "?", False),
    ],
)
def test_an_answer_in_the_prompt_is_a_fault(prompt: str, answer: str, leaks: bool) -> None:
    fault = find_answer_in_prompt(question(prompt, answer))
    assert (fault is not None) == leaks
    assert fault is None or fault[0] is Reason.ANSWER_IN_PROMPT


def test_a_duplicate_is_reported_with_the_first_task() -> None:
    def task(key: str, prompt: str) -> Task:
        return Task(key=key, env_key="e", prompt=prompt)

    sources = {
        "train": [task("a", "Close #4."), task("b", "close 4"), task("c", "other")],
        "eval": [task("d", "Other!"), task("a", "a new prompt"), task("e", "its own")],
    }
    assert find_duplicates(sources) == {
        ("train", "b"): (Reason.DUPLICATE, "the same as a"),
        ("eval", "d"): (Reason.OVERLAP, "the same as c of train"),
        ("eval", "a"): (Reason.OVERLAP, "the same as a of train"),
    }


def test_a_near_duplicate_is_reported_with_the_first_task() -> None:
    def task(key: str, first: str) -> Task:
        prompt = f"{first} move every open ticket of the billing queue to Ana and tell her why"
        return Task(key=key, env_key="e", prompt=prompt, verifier_code="v")

    sources = {"train": [task("a", "Please"), task("b", "Kindly")], "eval": [task("c", "Now")]}
    assert find_duplicates(sources) == {
        ("train", "b"): (Reason.DUPLICATE, "nearly the same as a"),
        ("eval", "c"): (Reason.OVERLAP, "nearly the same as a of train"),
    }


def test_a_duplicate_of_a_duplicate_only_is_no_fault() -> None:
    def task(key: str, prompt: str) -> Task:
        return Task(key=key, env_key="e", prompt=prompt)

    sources = {
        "train": [task("a", "one")],
        "eval": [task("a", "two"), task("b", "Two!"), task("c", "two")],
    }
    assert find_duplicates(sources) == {
        ("eval", "a"): (Reason.OVERLAP, "the same as a of train"),
        ("eval", "c"): (Reason.DUPLICATE, "the same as b"),
    }
