"""Mixed groups: how often a group of another size would hold both a pass and a failure.

A task passed with chance p makes a group of n mixed with chance 1 - p^n - (1 - p)^n. Putting the
observed rate in for p says 0 for every task that was never passed, however few the attempts. So up
to the attempts that were made the unbiased estimate is used, pass@n - pass^n, and beyond them,
where none exists, a Beta distribution of p over the tasks: its mean is theirs, and how alike they
are, from all alike to each always or never passed, is averaged over a grid, each point weighed by
how well it explains the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from skyfleet.metrics.intervals import pass_at_k, pass_hat_k

Counts = tuple[int, int]
"""Attempts at a task, and how many passed."""


def mixed_share(counts: Sequence[Counts], size: int) -> float:
    """Expected share of mixed groups. `mixed_share([(4, 1)], 2)` is 0.5: half of its six pairs."""
    if size <= min(attempts for attempts, _ in counts):
        return fmean(pass_at_k(n, c, size) - pass_hat_k(n, c, size) for n, c in counts)
    return _beta_binomial(counts, size)


def _beta_binomial(counts: Sequence[Counts], size: int) -> float:
    import numpy as np
    from scipy.special import betaln

    n, c = np.array(counts, dtype=float).T
    # Jeffreys' half a pass and half a failure keep the mean away from 0 and 1.
    mean = (c.sum() + 0.5) / (n.sum() + 1)
    strength_S = np.geomspace(1e-4, 1000, 71)
    a_S, b_S = mean * strength_S, (1 - mean) * strength_S
    # The same counts are common, and need their likelihood only once.
    kinds, repeats = np.unique(np.stack([n, c]), axis=1, return_counts=True)
    n_K, c_K = kinds[0, :, None], kinds[1, :, None]
    fit_S = repeats @ (betaln(a_S + c_K, b_S + n_K - c_K) - betaln(a_S, b_S))
    # Before the counts, every correlation 1 / (1 + strength) of two attempts at a task is as likely:
    # else where the grid happens to begin would decide for few tasks.
    fit_S += np.log(strength_S) - 2 * np.log1p(strength_S)
    weights_S = np.exp(fit_S - fit_S.max())
    alike_S = np.exp(betaln(a_S + size, b_S) - betaln(a_S, b_S))
    alike_S += np.exp(betaln(a_S, b_S + size) - betaln(a_S, b_S))
    return float(1 - weights_S @ alike_S / weights_S.sum())
