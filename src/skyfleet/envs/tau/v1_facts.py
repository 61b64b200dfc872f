"""What is known in advance of tau-bench's tasks at the tested commit: numbers that take seconds to find.

`tests/envs/tau/test_tau_bench.py` finds them again. They are not used with another version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

Place = tuple[str, str]
"""Domain and split."""

PASSED_BY_NOTHING: Mapping[Place, frozenset[int]] = {
    ("retail", "test"): frozenset((10, 12, 25, 50, 57, 65, 106)),
    ("retail", "train"): frozenset((161, 214, 229, 288, 349)),
    ("retail", "dev"): frozenset((17,)),
    ("airline", "test"): frozenset(
        (12, 13, 15, 17, 18, 21, 24, 29, 35, 36, 37, 38, 39, 40, 41, 42, 47, 48, 49)
    ),
}
"""Indices of tasks whose reference changes nothing and that ask for no output."""

REFERENCE_ERRORS: Mapping[Place, Mapping[int, int]] = {
    ("retail", "test"): Counter(
        [
            2,
            3,
            4,
            12,
            13,
            21,
            21,
            21,
            35,
            36,
            37,
            38,
            39,
            46,
            46,
            47,
            47,
            54,
            55,
            64,
            67,
            67,
            68,
            106,
        ]
    ),
    ("retail", "train"): Counter(
        [
            24,
            27,
            81,
            148,
            161,
            214,
            229,
            252,
            253,
            288,
            314,
            349,
            351,
            351,
            369,
            376,
            427,
            431,
            441,
            469,
        ]
    ),
}
"""By index: how many calls of the reference return an error."""
