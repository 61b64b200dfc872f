"""pass@k and pass^k count the draws they speak of."""

from __future__ import annotations

from itertools import combinations

import pytest

from skyfleet.metrics.intervals import pass_at_k, pass_hat_k


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_both_are_the_share_of_all_draws(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
            assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)
