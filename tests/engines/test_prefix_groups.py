"""Prefix groups: which sequences share the attention over their common prefix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from skyfleet.engines.cuda.prefix_groups import PrefixGroups


def find_groups(blocks: list[list[int]], lengths: list[int]) -> list[tuple[list[int], int]]:
    """Members and shared tokens of each group, for slots with these blocks."""
    table = np.zeros((len(blocks), 24), dtype=np.int32)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
    groups = PrefixGroups.allocate(len(blocks), 2, 8, torch.device("cpu"))
    if not groups.update(table, dict(enumerate(lengths))):
        return []
    shared_len = groups.shared_len_S.tolist()
    found = [
        ([slot for slot in row if slot >= 0], n)
        for row, n in zip(
            groups.members_SZ.tolist(), groups.group_shared_len_S.tolist(), strict=True
        )
        if n
    ]
    assert all(shared_len[slot] == n for slots, n in found for slot in slots)
    assert sum(n > 0 for n in shared_len) == sum(len(slots) for slots, _ in found)
    return found


def test_attempts_at_a_task_share_whole_key_blocks_of_their_prompt() -> None:
    # Nine equal KV blocks are 144 tokens; key blocks have 64.
    prompt = list(range(1, 10))
    assert find_groups([[*prompt, 20], [*prompt, 30], [*prompt, 40]], [150, 145, 160]) == [
        ([0, 1, 2], 128)
    ]


def test_a_token_that_is_not_computed_yet_is_not_shared() -> None:
    blocks = list(range(1, 13))
    assert find_groups([blocks, blocks], [192, 190]) == [([0, 1], 128)]


def test_sequences_with_a_short_common_prefix_form_no_group() -> None:
    assert find_groups([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 8, 9]], [80, 80, 40]) == []


def test_a_group_keeps_its_long_prefix_instead_of_joining_all_by_a_short_one() -> None:
    tools = list(range(1, 9))  # 128 tokens
    first, second = [*tools, *range(20, 28)], [*tools, *range(30, 38)]  # 256 tokens each
    found = find_groups([first, second, first, second, first, second], [257] * 6)
    assert found == [([0, 2, 4], 256), ([1, 3, 5], 256)]


def test_an_unrelated_sequence_does_not_split_a_group() -> None:
    prompt = list(range(5, 13))
    found = find_groups([[1, 2], [*prompt, 20], [*prompt, 30], [*prompt, 40]], [30, 130, 130, 130])
    assert found == [([1, 2, 3], 128)]


def test_single_attempts_share_the_prefix_of_all_tasks() -> None:
    tools = list(range(1, 17))
    found = find_groups([[*tools, 20 + slot] for slot in range(5)], [260] * 5)
    assert found == [([0, 1, 2, 3, 4], 256)]


@pytest.mark.parametrize("n", [16, 17, 33])
def test_no_group_has_more_members_than_group_size(n: int) -> None:
    blocks = list(range(1, 9))
    found = find_groups([[*blocks, 50 + slot] for slot in range(n)], [130] * n)
    # A single sequence forms no group.
    assert [len(slots) for slots, _ in found] == [16] * (n // 16)
