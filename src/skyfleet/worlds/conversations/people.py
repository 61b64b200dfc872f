"""Names of customers, in families of data seeds that share none."""

from __future__ import annotations

from random import Random

from skyfleet.worlds.toolkit import App
from skyfleet.worlds.vocabulary import Names

_FIRST = ("Ana", "Ben", "Clara", "David", "Emma", "Felix", "Hanna", "Ivan", "Julia", "Karim")
_LAST = ("Berg", "Costa", "Fischer", "Garcia", "Kim", "Lopez", "Meyer", "Novak", "Okafor", "Silva")
_PEOPLE = Names((*_FIRST, "Lena", "Marco"), (*_LAST, "Tanaka", "Weber"))


def sample_names(app: App, rng: Random, count: int) -> list[str]:
    """Return different full names of the data's family."""
    return rng.sample(_PEOPLE.in_family(app.family), count)
