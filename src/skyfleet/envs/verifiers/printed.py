"""Collect what a verifier prints, and read its result lines from what its own source wrote."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from typing import Any

from skyfleet.envs.verifiers.source_text import Entries, Tracker

MAX_CHARACTERS = 1_000_000
"""Of longer output the end is kept: a quoted text cannot use up the verifier's memory."""
MAX_APPS = 200
"""More lines than that are no verifier's: none of them counts."""

_JUDGE = re.compile(r"^JUDGE ERROR:.*", re.M)
_APP = re.compile(r"^App (.+): ([01])(?:\.0)?$", re.M)
_TRIVIAL = re.compile(
    r"no unexpected changes|no filesystem changes|no-unexpected-envelopes", re.IGNORECASE
)
"""Output of an app that needed no work: an agent that does nothing would pass it."""
_NOTE = (
    "[skyfleet] Result lines in texts that the verifier quotes do not count: only those that its "
    "own source writes, with a list in between.\n"
)


class Printed:
    """The output of one verifier; `print` is the function that the verifier gets."""

    def __init__(self, *, tracks: bool) -> None:
        """`tracks`: the source was compiled by `track_source`."""
        self.tracker = Tracker()
        self._tracks = tracks
        self._text, self._skeleton = _Tail(), _Tail()

    @property
    def text(self) -> str:
        return str(self._text)

    def print(
        self,
        *values: object,
        sep: str | None = None,
        end: str | None = None,
        file: Any = None,
        flush: bool = False,
    ) -> None:
        if file is not None:
            builtins.print(*values, sep=sep, end=end, file=file, flush=flush)
            return
        literal, shown = self.tracker.literal, [str(value) for value in values]
        sep = literal(" ") if sep is None else sep
        end = literal("\n") if end is None else end
        self._text.add(str.join(sep, shown) + str(end))
        if self._tracks:
            skeletons = map(self.tracker.skeleton_of, values)
            between, after = self.tracker.skeleton_of(sep), self.tracker.skeleton_of(end)
            self._skeleton.add(between.join(skeletons) + after)

    def find_judge_error(self) -> str | None:
        """Return the line by which the verifier reports that its judge model gave no answer."""
        found = _JUDGE.search(str(self._skeleton))
        return self.tracker.expand(found[0]) if found else None

    def compute_partial_credit(self) -> float:
        """Return the share of checks that passed; never enough for a success."""
        return _below_success(partial_reward(str(self._skeleton), self.tracker))

    def describe(self, *, partial_credit: bool) -> str:
        """Return the output, with a note if it has result lines that do not count."""
        text = self.text
        skips_judge = find_judge_error(text) is not None and self.find_judge_error() is None
        skips_share = partial_credit and (
            _count_results(text) != _count_results(str(self._skeleton), self.tracker)
        )
        return text + _NOTE if skips_judge or skips_share else text


class _Tail:
    """The last characters of a text that is written in pieces."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self._length += len(piece)
        if self._length > 2 * MAX_CHARACTERS:
            self._pieces = ["".join(self._pieces)[-MAX_CHARACTERS:]]
            self._length = len(self._pieces[0])

    def __str__(self) -> str:
        return "".join(self._pieces)


def find_judge_error(stdout: str) -> str | None:
    """Return the first `JUDGE ERROR:` line of a text."""
    found = _JUDGE.search(stdout)
    return found[0] if found else None


def compute_partial_credit(stdout: str) -> float:
    """Return the share of checks that a text reports as passed; never enough for a success."""
    return _below_success(partial_reward(stdout))


def _below_success(share: float | None) -> float:
    return share if share is not None and share < 1 else 0.0


def partial_reward(stdout: str, tracker: Tracker | None = None) -> float | None:
    """Read the share of apps that passed, among those that needed work, or else of checks.

    None if the output has neither. With a `tracker`, `stdout` is a skeleton.
    `partial_reward(">>> ERROR_ACCUMULATOR >>>\\n['no mail']\\n<<< ERROR_ACCUMULATOR <<<")` is 0.0.
    """
    if apps := _APP.findall(stdout):
        if len(apps) > MAX_APPS:
            return None
        earned = [
            passed == "1"
            for name, passed in apps
            if passed == "0" or not _TRIVIAL.search(_find_section(stdout, name, tracker))
        ]
        return sum(earned) / len(earned) if earned else None
    successes, errors = (
        sum(_count_entries(block, tracker) for block in _find_blocks(stdout, kind))
        for kind in ("SUCCESS", "ERROR")
    )
    return successes / (successes + errors) if successes + errors else None


def _count_results(stdout: str, tracker: Tracker | None = None) -> int:
    """Count the result lines by which `partial_reward` would go, without parsing any list.

    What an agent wrote must not take the verifier's time.
    """
    if apps := len(_APP.findall(stdout)):
        return apps
    return sum(
        _is_list(block, tracker)
        for kind in ("SUCCESS", "ERROR")
        for block in _find_blocks(stdout, kind)
    )


def _is_list(printed: str, tracker: Tracker | None) -> bool:
    value = tracker.find_value(printed) if tracker else printed
    if isinstance(value, Entries):
        return True
    # Of a skeleton: literal text only.
    return value is printed and printed[:1] == "[" and printed[-1:] == "]" and "\0" not in printed


def _find_section(stdout: str, app: str, tracker: Tracker | None) -> str:
    """Return what was printed while `app` was verified."""
    section = next(_find_between(stdout, f"<<< VERIFY_{app} <<<", f">>> VERIFY_{app} >>>"), "")
    return tracker.expand(section) if tracker else section


def _find_blocks(stdout: str, kind: str) -> Iterator[str]:
    """Yield what stands in the accumulators of this kind; each is a printed Python list."""
    return _find_between(stdout, f">>> {kind}_ACCUMULATOR >>>\n", f"\n<<< {kind}_ACCUMULATOR <<<")


def _find_between(text: str, opener: str, closer: str) -> Iterator[str]:
    # Not a regex: many openers without a closer would take it time quadratic in their number.
    at = 0
    while (start := text.find(opener, at)) >= 0:
        start += len(opener)
        end = text.find(closer, start)
        if end < 0:
            return
        yield text[start:end]
        at = end + len(closer)


def _count_entries(printed: str, tracker: Tracker | None) -> int:
    value = tracker.find_value(printed) if tracker else printed
    if isinstance(value, Entries):
        return int(value)
    if value is not printed:
        return 0  # a text that the verifier quotes
    try:
        entries = ast.literal_eval(printed)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return 0
    return len(entries) if isinstance(entries, list) else 0
