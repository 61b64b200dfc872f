"""search_history shows every hit in as few snippets as possible."""

from __future__ import annotations

from random import Random

import pytest

from skyfleet.envs.context_env import Past, search_history


def searched(text: str, pattern: str) -> list[str]:
    past = Past(page_characters=100, messages=[("turn 1, tool", text)])
    return search_history(past, pattern).split("\n")


@pytest.mark.parametrize(
    ("text", "snippets"),
    [
        # Two in one stretch of 200 characters are one snippet.
        (f"heron{'-' * 80}heron{'-' * 500}", [f"heron{'-' * 80}heron{'-' * 110}…"]),
        # The second begins where the first snippet ends, not in the middle of it.
        (
            f"heron{'-' * 245}heron{'+' * 500}",
            [f"heron{'-' * 195}…", f"…{'-' * 50}heron{'+' * 145}…"],
        ),
        # A hit that the first snippet cuts is shown whole in the second.
        (f"heron{'-' * 193}heron{'+' * 500}", [f"heron{'-' * 193}he…", f"…heron{'+' * 195}…"]),
    ],
)
def test_snippets_do_not_overlap(text: str, snippets: list[str]) -> None:
    assert searched(text, "heron") == [f"turn 1, tool: {snippet}" for snippet in snippets]


def test_words_longer_than_a_snippet_are_found_once() -> None:
    assert len(searched(f"{'-' * 300}{'heron ' * 50}{'-' * 300}", "heron " * 50)) == 1


def test_every_hit_is_shown_whole_wherever_it_stands() -> None:
    rng = Random(0)
    for _ in range(200):
        names = iter(f"<{n}>heron" for n in range(100))
        text = "".join(next(names) + "-" * rng.randrange(300) for _ in range(rng.randrange(1, 7)))
        shown = "\n".join(searched(text, "heron"))
        assert shown.count("heron") == text.count("heron")


def test_hits_beyond_ten_are_counted_by_their_stretches() -> None:
    # A hit every 100 characters: a snippet of 200 shows two of them.
    assert searched(("x" + "-" * 99) * 1000, "x")[10:] == ["[490 more; search for longer words]"]
