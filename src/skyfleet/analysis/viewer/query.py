"""Query: which episodes are asked for, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any, Literal, get_args

from skyfleet.analysis.viewer.listing import Snapshot
from skyfleet.errors import SkyfleetError
from skyfleet.trajectories.entry import Entry

Outcome = Literal["passed", "failed", "unknown"]

ORDERS: Mapping[str, tuple[Callable[[Entry], Any], bool]] = {
    "newest": (lambda entry: entry.step, True),
    "oldest": (lambda entry: entry.step, False),
    "task": (lambda entry: (entry.env_key, entry.task_key, entry.step, entry.sample), False),
    "reward": (lambda entry: -inf if entry.reward is None else entry.reward, True),
    "turns": (lambda entry: entry.turns, True),
    "errors": (lambda entry: entry.tool_errors + entry.malformed_calls, True),
    "tokens": (lambda entry: entry.sampled_tokens, True),
    "seconds": (lambda entry: entry.seconds, True),
}
"""What each looks at, and whether the most comes first."""


class QueryError(SkyfleetError, ValueError):
    """An address asks for something that is not there to be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """An empty field asks for everything."""

    env: str = ""
    outcome: str = ""
    kind: str = ""
    set_name: str = ""
    step: int | None = None
    sort: str = "newest"

    @classmethod
    def of(cls, params: Mapping[str, str]) -> Query:
        """From an address: `Query.of({"env": "github", "step": "40"})`."""
        return cls(
            env=params.get("env", ""),
            outcome=_one_of(params, "outcome", ("", *get_args(Outcome))),
            kind=_one_of(params, "kind", ("", "train", "eval")),
            set_name=params.get("set", ""),
            step=whole_number(params, "step"),
            sort=_one_of(params, "sort", tuple(ORDERS)) or "newest",
        )

    def holds(self, entry: Entry) -> bool:
        return (
            (not self.env or entry.env_key == self.env)
            and (not self.outcome or outcome_of(entry.success) == self.outcome)
            and (not self.kind or entry.kind == self.kind)
            and (not self.set_name or entry.set_name == self.set_name)
            and (self.step is None or entry.step == self.step)
        )


def outcome_of(success: bool | None) -> Outcome:
    if success is None:
        return "unknown"
    return "passed" if success else "failed"


@lru_cache(maxsize=16)
def chosen(snapshot: Snapshot, query: Query) -> list[Entry]:
    """The entries asked for, in order; the same list again for every page of it."""
    return ordered(filter(query.holds, snapshot.entries), query.sort)


def ordered(entries: Iterable[Entry], sort: str) -> list[Entry]:
    measure, most_first = ORDERS[sort]
    return sorted(entries, key=measure, reverse=most_first)


def whole_number(params: Mapping[str, str], key: str) -> int | None:
    """None where it is not given."""
    text = params.get(key, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise QueryError(f"{key}={text!r}; give a whole number such as 40")
    return int(text)


def _one_of(params: Mapping[str, str], key: str, known: tuple[str, ...]) -> str:
    text = params.get(key, "")
    if text and text not in known:
        raise QueryError(f"{key}={text!r}; choose from {[name for name in known if name]}")
    return text
