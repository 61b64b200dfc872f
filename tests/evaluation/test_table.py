"""Tables are aligned Markdown with one row per set and environment."""

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


BEFORE = EvalReport.from_groups(
    "eval", tasks("mail", *[0.0] * 9, 1.0) + tasks("a|b", *[1.0] * 20), step=0
)
AFTER = EvalReport.from_groups(
    "eval", tasks("mail", *[1.0] * 9, None) + tasks("a|b", *[1.0] * 20), step=80
)
TABLE = comparison_table([compare(BEFORE, AFTER)])


def test_each_environment_has_a_row_followed_by_all() -> None:
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


def test_the_number_of_left_out_tasks_is_below_the_table() -> None:
    assert TABLE.endswith(
        "\nTasks left out because they are not graded both before and after: 1.\n"
    )


def test_sets_of_one_environment_have_no_all_row() -> None:
    one = EvalReport.from_groups("one", tasks("mail", 1.0, 0.0), step=0)
    two = EvalReport.from_groups("two", tasks("shop", 1.0, 0.0), step=0)
    lines = comparison_table([compare(one, one), compare(two, two)]).splitlines()
    assert [line.split("|")[1:3] for line in lines[2:]] == [
        [" one ", " mail        "],
        [" two ", " shop        "],
    ]


def test_a_table_without_comparisons_is_a_header() -> None:
    assert len(comparison_table([]).splitlines()) == 2


def test_the_evidence_table_has_p_detectable_difference_and_tasks_needed() -> None:
    """9 gained of 9 is p = 2/512, twice that among two environments, and 6 tasks show it.

    20 tasks that agree detect 0.366: then 6 or more of them are gained with probability 0.8.
    9 tasks of which one may be lost detect 0.815 with the same probability.
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
    """Forty tasks before and after; half of the unchanged ones pass."""
    same = [float(number % 2) for number in range(40 - gained - lost)]
    before = [0.0] * gained + [1.0] * lost + same
    after = [1.0] * gained + [0.0] * lost + same
    return tasks(env_key, *before), tasks(env_key, *after)


NOTE = "Some intervals exclude 0 without a significant change: "
HOLM = "verdicts are corrected over the environments (Holm) and intervals are not"
TEST = "the test behind the verdict is stricter than the interval"


@pytest.mark.parametrize(
    ("envs", "note"),
    [
        # 9 gained and 1 lost: 2 x 11 / 1024 = 0.021, and 0.064 among three environments.
        ({"mail": (9, 1), "shop": (3, 3), "maps": (3, 3)}, f"{NOTE}{HOLM}."),
        # 7 and 1: 2 x 9 / 256 = 0.070, though the interval of Student's t is above 0.
        ({"mail": (7, 1)}, f"{NOTE}{TEST}."),
        ({"mail": (7, 1), "shop": (9, 1), "maps": (3, 3)}, f"{NOTE}{HOLM}; {TEST}."),
        ({"mail": (10, 0), "shop": (3, 3)}, None),
    ],
)
def test_a_conflict_between_interval_and_verdict_is_explained_below_the_table(
    envs: dict[str, tuple[int, int]], note: str | None
) -> None:
    sides = [changed(env_key, gained, lost) for env_key, (gained, lost) in envs.items()]
    before, after = (
        EvalReport.from_groups("eval", [one for side in sides for one in side[at]], step=at)
        for at in (0, 1)
    )
    comparison = compare(before, after)
    for table in (comparison_table([comparison]), evidence_table([comparison])):
        assert [line for line in table.splitlines() if NOTE in line] == ([note] if note else [])
        assert table.endswith(f"{note}\n" if note else "\n")


def test_the_tasks_needed_state_the_attempts_per_task() -> None:
    before = EvalReport.from_groups(
        "eval", [group([0.0, 0.0], task_key=str(i)) for i in range(9)], step=0
    )
    after = EvalReport.from_groups(
        "eval", [group([1.0, 1.0], task_key=str(i)) for i in range(9)], step=1
    )
    assert evidence_table([compare(before, after)]).splitlines()[2].endswith("|  6 x 2 |")


def test_the_score_table_has_a_row_per_part_and_counts_unknown_grades() -> None:
    report = EvalReport.from_groups(
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


def test_single_attempts_have_no_pass_at_k_column() -> None:
    assert "pass@1 | 95 % interval | mean score" in score_table([BEFORE])
