"""The comparison table is aligned markdown."""

from __future__ import annotations

import pytest
from tests.trajectories.making import group

from skyfleet.evaluation.baselines import Baseline
from skyfleet.evaluation.compare import compare
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.table import comparison_table, evidence_table, score_table
from skyfleet.tasks.task import Task
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


def test_the_evidence_stands_beside_the_verdict() -> None:
    """9 gained of 9 is p = 2/512, twice that among two environments, and 6 tasks show it.

    20 tasks that agree could show 0.366: so often 6 or more of them are gained four times in five.
    With one of 9 lost it is still significant, and so it is as often where 0.815 more are gained.
    """
    header, _, saturated, improved, overall, *_ = evidence_table(
        [compare(BEFORE, AFTER)]
    ).splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")][7:] == [
        "p", "verdict", "detectable", "needed",
    ]  # fmt: skip
    assert saturated.endswith("|      1 | SATURATED |       36.6 |        |")
    assert improved.endswith("| 0.0078 | IMPROVED  |       81.5 |      6 |")
    assert "| 0.0039 | IMPROVED" in overall


def changed(env_key: str, gained: int, lost: int) -> tuple[list[Group], list[Group]]:
    """Forty tasks before and after; those that did not change are passed and failed by halves."""
    same = [float(number % 2) for number in range(40 - gained - lost)]
    before = [0.0] * gained + [1.0] * lost + same
    after = [1.0] * gained + [0.0] * lost + same
    return tasks(env_key, *before), tasks(env_key, *after)


WHERE = "Where an interval leaves out 0 and the verdict sees no change: "
HOLM = "verdicts are corrected over the environments (Holm), intervals are not"
TEST = "a verdict's test asks for more than the interval does"


@pytest.mark.parametrize(
    ("envs", "told"),
    [
        # 9 gained and 1 lost: 2 x 11 / 1024 = 0.021, and 0.064 among three environments.
        ({"mail": (9, 1), "shop": (3, 3), "maps": (3, 3)}, f"{WHERE}{HOLM}."),
        # 7 and 1: 2 x 9 / 256 = 0.070, though the interval of Student's t is above 0.
        ({"mail": (7, 1)}, f"{WHERE}{TEST}."),
        ({"mail": (7, 1), "shop": (9, 1), "maps": (3, 3)}, f"{WHERE}{HOLM}; {TEST}."),
        ({"mail": (10, 0), "shop": (3, 3)}, None),
    ],
)
def test_a_verdict_that_goes_against_its_interval_is_explained_below_the_table(
    envs: dict[str, tuple[int, int]], told: str | None
) -> None:
    sides = [changed(env_key, gained, lost) for env_key, (gained, lost) in envs.items()]
    before, after = (
        EvalReport.of("eval", [one for side in sides for one in side[at]], step=at) for at in (0, 1)
    )
    comparison = compare(before, after)
    for table in (comparison_table([comparison]), evidence_table([comparison])):
        assert [line for line in table.splitlines() if WHERE in line] == ([told] if told else [])
        assert table.endswith(f"{told}\n" if told else "\n")


def test_several_attempts_multiply_what_is_needed() -> None:
    before = EvalReport.of("eval", [group([0.0, 0.0], task_key=str(i)) for i in range(9)], step=0)
    after = EvalReport.of("eval", [group([1.0, 1.0], task_key=str(i)) for i in range(9)], step=1)
    assert evidence_table([compare(before, after)]).splitlines()[2].endswith("|  6 x 2 |")


def test_scores_have_a_row_for_every_part_and_unknown_grades_apart() -> None:
    report = EvalReport.of(
        "eval",
        [
            group([1.0, 0.0], task_key="a"),
            group([1.0, None], task_key="b"),
            group([None], task_key="c", env_key="mail"),
        ],
        step=0,
        tasks=[Task(key="a", env_key="github", prompt="p", difficulty=3)],
        trained_envs=["mail"],
        baselines={"github": Baseline(null_rate=0.0, oracle_rate=None, vacuous=(), impossible=())},
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in score_table([report]).splitlines()
    ]
    assert rows[0] == [
        "set", "part", "tasks", "pass@1", "95 % interval", "pass@2", "pass^2", "mean score",
        "unknown", "null", "oracle",
    ]  # fmt: skip
    assert [row[1] for row in rows[2:]] == [
        "github", "mail", "3 hard", "unstated", "held out", "trained", "all",
    ]  # fmt: skip
    assert rows[2][2:4] + rows[2][5:] == [
        "2", "75.0 %", "100.0 %", "0.0 %", "0.750", "1", "0.0 %", "",
    ]  # fmt: skip
    assert rows[3][2:] == ["0", "", "", "", "", "", "1", "", ""]
    assert rows[-1][-3:] == ["2", "", ""]


def test_single_attempts_have_no_column_for_more() -> None:
    assert "pass@1 | 95 % interval | mean score" in score_table([BEFORE])
