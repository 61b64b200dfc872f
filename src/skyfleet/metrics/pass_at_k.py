"""pass@k and pass^k: what k attempts at a task are worth, from n that were made."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k drawn attempts is among the c that succeeded. (4, 1, 2) gives 0.5."""
    _check(n, c, k)
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Chance that all k drawn attempts are among the c that succeeded. (4, 3, 2) gives 0.5."""
    _check(n, c, k)
    return comb(c, k) / comb(n, k)


def _check(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n={n}, c={c}, k={k}; give 0 <= c <= n and 1 <= k <= n")
