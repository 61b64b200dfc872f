"""Sequences that begin with the same pages meet those keys together, as far as that pays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from skyfleet.engines.cuda.prefix_groups import Kin


def gathered(pages: list[list[int]], lengths: list[int]) -> list[tuple[list[int], int]]:
    """Members and shared tokens of each cluster, for slots with these pages."""
    table = np.zeros((len(pages), 24), dtype=np.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    kin = Kin.among(len(pages), 2, 8, torch.device("cpu"))
    if not kin.gather(table, dict(enumerate(lengths))):
        return []
    met = kin.met_S.tolist()
    found = [
        ([slot for slot in row if slot >= 0], n)
        for row, n in zip(kin.members_SZ.tolist(), kin.shared_S.tolist(), strict=True)
        if n
    ]
    assert all(met[slot] == n for slots, n in found for slot in slots)
    assert sum(n > 0 for n in met) == sum(len(slots) for slots, _ in found)
    return found


def test_attempts_at_a_task_share_whole_blocks_of_their_prompt() -> None:
    # Nine pages alike are 144 tokens; blocks have 64.
    prompt = list(range(1, 10))
    assert gathered([[*prompt, 20], [*prompt, 30], [*prompt, 40]], [150, 145, 160]) == [
        ([0, 1, 2], 128)
    ]


def test_a_token_that_is_not_computed_yet_is_not_shared() -> None:
    pages = list(range(1, 13))
    assert gathered([pages, pages], [192, 190]) == [([0, 1], 128)]


def test_who_shares_little_or_nothing_is_no_kin() -> None:
    assert gathered([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 8, 9]], [80, 80, 40]) == []


def test_a_group_does_not_give_up_its_prompt_for_what_all_groups_share() -> None:
    tools = list(range(1, 9))  # 128 tokens
    first, second = [*tools, *range(20, 28)], [*tools, *range(30, 38)]  # 256 tokens each
    found = gathered([first, second, first, second, first, second], [257] * 6)
    assert found == [([0, 2, 4], 256), ([1, 3, 5], 256)]


def test_a_stranger_does_not_come_between_kin() -> None:
    prompt = list(range(5, 13))
    found = gathered([[1, 2], [*prompt, 20], [*prompt, 30], [*prompt, 40]], [30, 130, 130, 130])
    assert found == [([1, 2, 3], 128)]


def test_single_attempts_share_what_all_tasks_begin_with() -> None:
    tools = list(range(1, 17))
    found = gathered([[*tools, 20 + slot] for slot in range(5)], [260] * 5)
    assert found == [([0, 1, 2, 3, 4], 256)]


@pytest.mark.parametrize("n", [16, 17, 33])
def test_no_cluster_has_more_members_than_seats(n: int) -> None:
    pages = list(range(1, 9))
    found = gathered([[*pages, 50 + slot] for slot in range(n)], [130] * n)
    # One left over alone is nobody's kin.
    assert [len(slots) for slots, _ in found] == [16] * (n // 16)
