from __future__ import annotations

from skyfleet.curation.stats import (
    Spread,
    compute_stats,
    describe_variables,
    format_stats,
    render_stats_html,
)
from skyfleet.tasks.task import RecordedCall, Task

LOOK, WRITE = RecordedCall(name="look"), RecordedCall(name="write")
TASKS = [
    Task(key="a", env_key="<e>", prompt="one two", difficulty=1, solution=(LOOK, WRITE)),
    Task(key="b", env_key="<e>", prompt="One two.", difficulty=1, solution=(LOOK, LOOK, WRITE)),
    Task(key="c", env_key="<e>", prompt="one two three four", solution=(LOOK,)),
    Task(key="d", env_key="d", prompt="one", difficulty=0, env_variables={"USER": "Ana"}),
    Task(key="e", env_key="d", prompt="two"),
]


def test_each_env_is_described() -> None:
    plain, e = sorted(compute_stats(TASKS), key=lambda one: one.n_tasks)
    assert (plain.env_key, plain.n_tasks, plain.tools) == ("d", 2, ())
    assert format_stats([plain])[0][3:5] == ("50 %", "none: 1, 0: 1")
    assert (e.n_tasks, e.n_prompts) == (3, 2)
    assert e.difficulties == ((None, 1), (1, 2))
    assert e.calls == Spread(low=1, middle=2, high=3)
    assert e.prompt_words == Spread(low=2, middle=2, high=4)
    assert e.tools == (("look", 3), ("write", 2))


def test_cells_are_formatted_and_html_is_escaped() -> None:
    cells = format_stats(compute_stats(TASKS))[0]
    assert cells == (
        "<e>",
        "3",
        "2",
        "0 %",
        "none: 1, 1: 2",
        "1 / 2 / 3",
        "2 / 2 / 4",
        "look 3, write 2",
    )
    section = render_stats_html("a & b", compute_stats(TASKS))
    assert "<h2>a &amp; b</h2>" in section
    assert "<td>&lt;e&gt;</td>" in section
    assert section.count("<tr>") == 3
    assert "Rows with env_variables: 20 % (1 of 5)." in section


def test_one_row_of_many_without_variables_is_not_a_hundred_percent() -> None:
    rows = [
        Task(key=str(n), env_key="e", prompt=str(n), env_variables={"A": "1"} if n else {})
        for n in range(400)
    ]
    assert describe_variables(compute_stats(rows)) == "rows with env_variables: 99 % (399 of 400)"
