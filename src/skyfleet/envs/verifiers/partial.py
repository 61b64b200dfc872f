"""Partial credit: the share of a verifier's checks that passed, read from what it printed."""

from __future__ import annotations

import ast
import re

_APP = re.compile(r"^App (.+): ([01])(?:\.0)?$", re.M)
_TRIVIAL = re.compile(
    r"no unexpected changes|no filesystem changes|no-unexpected-envelopes", re.IGNORECASE
)
"""What an app reports that nobody had to touch: who does nothing would pass it."""


def partial_reward(stdout: str) -> float | None:
    """The apps that passed of those that had to be worked in, or else the checks that passed.

    None where the output does not tell.
    `partial_reward(">>> ERROR_ACCUMULATOR >>>\\n['no mail']\\n<<< ERROR_ACCUMULATOR <<<")` is 0.0.
    """
    if apps := _APP.findall(stdout):
        earned = [
            passed == "1"
            for name, passed in apps
            if passed == "0" or not _TRIVIAL.search(_section(stdout, name))
        ]
        return sum(earned) / len(earned) if earned else None
    successes, errors = _count(stdout, "SUCCESS"), _count(stdout, "ERROR")
    return successes / (successes + errors) if successes + errors else None


def _section(stdout: str, app: str) -> str:
    """What was printed while `app` was verified."""
    name = re.escape(app)
    found = re.search(rf"<<< VERIFY_{name} <<<(.*?)>>> VERIFY_{name} >>>", stdout, re.S)
    return found[1] if found else ""


def _count(stdout: str, kind: str) -> int:
    """Entries of the accumulators of this kind, each of which is a list as Python prints it."""
    blocks = re.findall(
        rf">>> {kind}_ACCUMULATOR >>>\n(.*?)\n<<< {kind}_ACCUMULATOR <<<", stdout, re.S
    )
    return sum(map(_length, blocks))


def _length(printed: str) -> int:
    try:
        entries = ast.literal_eval(printed)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return 0
    return len(entries) if isinstance(entries, list) else 0
