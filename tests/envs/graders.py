"""A module of helper functions, for the tests of the code that grades."""

LIMIT = 3


def is_short(answer: str) -> bool:
    return len(answer) < LIMIT
