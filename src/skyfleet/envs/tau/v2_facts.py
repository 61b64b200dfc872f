"""What is known in advance of tau2's base tasks at the tested commit; see `v1_facts`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

PASSED_BY_NOTHING: Mapping[str, Collection[str]] = {
    "airline": frozenset(
        [
            "0",
            "1",
            "2",
            "4",
            "5",
            "6",
            "9",
            "10",
            "13",
            "26",
            "27",
            "28",
            "31",
            "34",
            "36",
            "38",
            "41",
            "43",
            "45",
            "46",
            "47",
            "48",
            "49",
        ]
    ),
    "retail": frozenset(["10", "12", "24", "25", "50", "57", "62", "65", "67", "68", "105"]),
    "telecom": frozenset(),
    "mock": frozenset(("create_task_1_nl_eval",)),
}
"""Ids of tasks, by domain. In retail a judge of the assertions might fail some of them."""

REFERENCE_ERRORS: Mapping[str, Mapping[str, int]] = {
    "retail": Counter(
        [
            "2",
            "3",
            "4",
            "35",
            "37",
            "38",
            "39",
            "46",
            "46",
            "47",
            "47",
            "54",
            "55",
            "64",
            "67",
            "67",
            "68",
            "105",
        ]
    ),
}
"""How many calls of the agent's reference return an error, by domain and id."""

WITHOUT_REFERENCE = frozenset(
    ("update_task_with_history_and_env_assertions", "update_task_with_user_tools")
)
"""Tasks of mock whose listed actions do not reach what they assert: the first lists none and continues
an earlier conversation, in the second the user has to act unasked."""
