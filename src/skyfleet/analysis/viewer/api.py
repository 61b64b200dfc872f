"""Viewer: every question the page asks, answered with values ready for JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, get_args

from skyfleet.analysis.run_folder import RunFolder
from skyfleet.analysis.viewer.difference import difference
from skyfleet.analysis.viewer.episode import Decode, decoder_of, episode, picture, row, tokens
from skyfleet.analysis.viewer.failure_classes import Classes
from skyfleet.analysis.viewer.listing import (
    ORDERS,
    Listing,
    Outcome,
    Query,
    QueryError,
    Snapshot,
    chosen,
    ordered,
    outcome_of,
    whole_number,
)
from skyfleet.analysis.viewer.search import FINDS_AT_MOST, Search, Searches
from skyfleet.trajectories.archive import load
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.records import RecordError


class Facts(NamedTuple):
    """What the menus know of an episode, in the order of the menus."""

    env: str
    outcome: str
    where: str
    """`train`, or `eval:` and the set."""
    step: int
    failure_class: str


Tally = Counter[Facts]


def tally(snapshot: Snapshot, classes: Classes) -> Tally:
    """How many episodes there are of each kind."""
    return Counter(
        Facts(
            entry.env_key,
            outcome_of(entry.success),
            f"eval:{entry.set_name}" if entry.kind == "eval" else entry.kind,
            entry.step,
            "" if entry.success else classes.of(entry),
        )
        for entry in snapshot.entries
    )


def menus(counts: Tally, query: Query, failure_class: str) -> dict[str, dict[str, int]]:
    """By menu, its values and how many episodes each would leave, the other menus as they are."""
    found: tuple[Counter[Any], ...] = tuple(Counter() for _ in Facts._fields)
    for facts, n in counts.items():
        missed = [at for at, holds in enumerate(_holds(facts, query, failure_class)) if not holds]
        for at in range(len(facts)) if not missed else missed if len(missed) == 1 else ():
            found[at][facts[at]] += n
    env, outcome, where, step, classes = found
    classes.pop("", None)
    return {
        "env": dict(sorted(env.items())),
        "outcome": {name: outcome[name] for name in get_args(Outcome) if name in outcome},
        "where": dict(sorted(where.items())),
        "step": {str(number): step[number] for number in sorted(step)},
        "class": dict(classes.most_common()),
    }


def by_env(counts: Tally) -> dict[str, Counter[str]]:
    """How often each environment was passed, failed, or left unknown, whatever is asked for."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for facts, n in sorted(counts.items()):
        found[facts.env][facts.outcome] += n
    return found


def _holds(facts: Facts, query: Query, failure_class: str) -> tuple[bool, ...]:
    """Menu by menu, whether the episode is asked for."""
    kind, _, set_name = facts.where.partition(":")
    return (
        not query.env or facts.env == query.env,
        not query.outcome or facts.outcome == query.outcome,
        query.kind in ("", kind) and query.set_name in ("", set_name),
        query.step is None or facts.step == query.step,
        not failure_class or facts.failure_class == failure_class,
    )


PAGE_ROWS = 200
_ATTEMPTS_SHOWN = 40
_IMPORTED = "imported: configuration, tokens and times are not recorded"

Params = Mapping[str, str]

_load = lru_cache(maxsize=8)(load)


class Viewer:
    """One run, opened for reading."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._listing = Listing(run.trajectories)
        self._searches = Searches()
        self._classes = Classes()
        self._tallied: tuple[tuple[int, int], Tally] = ((-1, 0), Counter())

    def run(self, params: Params) -> dict[str, Any]:
        """The run's name and what its episodes can be filtered by, under the filters given."""
        snapshot = self._listing.now()
        self._classes.look_at(snapshot)
        # Before the counts: when none is left, all are in them.
        unclassified = self._classes.waiting
        counts = self._tally(snapshot)
        try:
            query = Query.of(params)
        except QueryError:  # told with the episodes; the menus are the way out
            query = Query()
        config = self._run.config
        return {
            "name": self._run.path.resolve().name,
            "model": _IMPORTED if self._run.imported else config.trainer.policy.model.path,
            "page_rows": PAGE_ROWS,
            "sorts": list(ORDERS),
            "unclassified": unclassified,
            "trouble": self._classes.trouble,
            "revision": snapshot.revision,
            "total": len(snapshot.entries),
            "by_env": by_env(counts),
            "menus": menus(counts, query, params.get("class", "")),
        }

    def episodes(self, params: Params) -> dict[str, Any]:
        """One page of the episodes asked for; with a text, those found so far.

        `open_at` is the place among them of the one that `open` names.
        """
        query = Query.of(params)
        revision = whole_number(params, "revision")
        snapshot = self._listing.now() if revision is None else self._listing.at(revision)
        text = params.get("text", "").strip()
        search = self._searches.get(snapshot, query, text) if text else None
        # Before the finds: a search that is over has no more of them.
        progress = _progress(search) if search else None
        finds = dict(search.finds) if search else {}
        entries = ordered(finds, query.sort) if search else chosen(snapshot, query)
        if wanted := params.get("class"):
            entries = [entry for entry in entries if self._classes.of(entry) == wanted]
        start = (whole_number(params, "page") or 0) * PAGE_ROWS
        return {
            "revision": snapshot.revision,
            "total": len(entries),
            "open_at": _place(snapshot, entries, params.get("open", "")),
            "rows": [
                self._row(entry, finds.get(entry, "") if finds else "")
                for entry in entries[start : start + PAGE_ROWS]
            ],
            "search": progress,
        }

    def episode(self, entry_id: str) -> dict[str, Any]:
        """All that is read of one episode, and where the other attempts at its task are."""
        snapshot = self._listing.now()
        entry = snapshot.find(entry_id)
        trajectory = _load(entry)
        self._classes.read(entry, trajectory)
        same = [e for e in snapshot.entries if e.task_key == entry.task_key]
        return {
            **self._row(entry),
            **episode(trajectory),
            "attempts": [row(other) for other in _around(same, entry)],
            "attempts_total": len(same),
        }

    def tokens(self, entry_id: str) -> dict[str, Any]:
        trajectory = _load(self._listing.now().find(entry_id))
        return {"transcripts": tokens(trajectory, self._decode)}

    def compare(self, params: Params) -> dict[str, Any]:
        """Two episodes side by side, and where they part."""
        snapshot = self._listing.now()
        left, right = (snapshot.find(params.get(side, "")) for side in ("a", "b"))
        return {
            "left": self._row(left),
            "right": self._row(right),
            **difference(_load(left), _load(right)),
        }

    def picture(self, entry_id: str, number: int) -> tuple[str, bytes]:
        """The media type and bytes of an episode's n-th picture."""
        shown = picture(_load(self._listing.now().find(entry_id)), number)
        if shown is None:
            raise RecordError(f"{entry_id!r} has no picture {number} that a browser can show")
        return shown

    def close(self) -> None:
        self._searches.close()
        self._classes.close()

    @cached_property
    def _decode(self) -> Decode | None:
        return decoder_of(self._run.path)

    def _tally(self, snapshot: Snapshot) -> Tally:
        """Counted again only where an episode or a class came in."""
        key = snapshot.revision, len(self._classes)
        if self._tallied[0] != key:
            self._tallied = key, tally(snapshot, self._classes)
        return self._tallied[1]

    def _row(self, entry: Entry, passage: str = "") -> dict[str, Any]:
        return row(entry, failure_class=self._classes.of(entry), passage=passage)


def _place(snapshot: Snapshot, entries: Sequence[Entry], entry_id: str) -> int | None:
    try:
        wanted = snapshot.find(entry_id)
    except RecordError:
        return None
    return next((at for at, entry in enumerate(entries) if entry is wanted), None)


def _around(same: Sequence[Entry], entry: Entry) -> Sequence[Entry]:
    """The nearest attempts, when a task has more than are shown."""
    start = max(0, same.index(entry) - _ATTEMPTS_SHOWN // 2)
    return same[start : start + _ATTEMPTS_SHOWN]


def _progress(search: Search) -> dict[str, Any]:
    return {
        "running": search.running,
        "seen": search.seen,
        "total": search.total,
        "at_most": FINDS_AT_MOST if search.full else None,
        "error": search.error,
    }
