"""The comparison table is aligned markdown."""

from __future__ import annotations

from tests.trajectories.making import group

from skyfleet.evaluation.compare import compare
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.table import comparison_table
from skyfleet.trajectories.trajectory import Group


def tasks(env_key: str, *rewards: float | None) -> list[Group]:
    return [
        group([reward], task_key=f"{env_key}{i}", env_key=env_key)
        for i, reward in enumerate(rewards)
    ]


BEFORE = EvalReport.of("eval", tasks("mail", *[0.0] * 9, 1.0) + tasks("a|b", *[1.0] * 20), step=0)
AFTER = EvalReport.of("eval", tasks("mail", *[1.0] * 9, None) + tasks("a|b", *[1.0] * 20), step=80)
TABLE = comparison_table([compare(BEFORE, AFTER)])


def test_each_environment_has_a_row_and_then_all() -> None:
    lines = TABLE.splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        "set", "environment", "tasks", "pass@1 before", "after", "difference", "95 % interval", "verdict",
    ]  # fmt: skip
    assert lines[2].startswith(
        r"| eval | a\|b        |    20 |       100.0 % | 100.0 % |       +0.0 |"
    )
    assert lines[2].endswith("| SATURATED |")
    assert lines[3].startswith(
        "| eval | mail        |     9 |         0.0 % | 100.0 % |     +100.0 |"
    )
    assert lines[3].endswith("| IMPROVED  |")
    assert lines[4].startswith(
        "| eval | all         |    29 |        69.0 % | 100.0 % |      +31.0 |"
    )


def test_columns_are_aligned() -> None:
    assert len({len(line) for line in TABLE.splitlines()[:5]}) == 1


def test_left_out_tasks_are_said() -> None:
    assert TABLE.endswith("\nTasks left out, for want of a known grade before and after: 1.\n")


def test_sets_of_one_environment_have_no_all_row() -> None:
    one = EvalReport.of("one", tasks("mail", 1.0, 0.0), step=0)
    two = EvalReport.of("two", tasks("shop", 1.0, 0.0), step=0)
    lines = comparison_table([compare(one, one), compare(two, two)]).splitlines()
    assert [line.split("|")[1:3] for line in lines[2:]] == [
        [" one ", " mail        "],
        [" two ", " shop        "],
    ]


def test_nothing_compared_is_a_header() -> None:
    assert len(comparison_table([]).splitlines()) == 2
