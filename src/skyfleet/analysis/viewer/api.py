"""Viewer API: the data behind each request of the page, as JSON-compatible values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, get_args

from skyfleet.analysis.run_folder import RunFolder
from skyfleet.analysis.viewer.episode import Decode, episode, load_decoder, picture, row, tokens
from skyfleet.analysis.viewer.episode_diff import compare_episodes
from skyfleet.analysis.viewer.failure_classes import FailureClassifier
from skyfleet.analysis.viewer.listing import (
    ORDERS,
    Listing,
    Outcome,
    Query,
    QueryError,
    Snapshot,
    get_outcome,
    parse_int,
    select_entries,
    sort_entries,
)
from skyfleet.analysis.viewer.search import MAX_FINDS, Search, Searches
from skyfleet.trajectories.archive import load
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.records import RecordError

PAGE_ROWS = 200
_ATTEMPTS_SHOWN = 40
_IMPORTED = "imported: configuration, tokens and times are not recorded"
Params = Mapping[str, str]
_load = lru_cache(maxsize=8)(load)


class Facts(NamedTuple):
    """The values of an episode that the filter menus use, in the order of the menus."""

    env: str
    outcome: str
    where: str
    """`train`, or `eval:` followed by the name of the set."""
    step: int
    failure_class: str


EpisodeCounts = Counter[Facts]


def count_episodes(snapshot: Snapshot, classes: FailureClassifier) -> EpisodeCounts:
    """The number of episodes per combination of menu values."""
    return Counter(
        Facts(
            entry.env_key,
            get_outcome(entry.success),
            f"eval:{entry.set_name}" if entry.kind == "eval" else entry.kind,
            entry.step,
            "" if entry.success else classes.get(entry),
        )
        for entry in snapshot.entries
    )


def build_menus(
    counts: EpisodeCounts, query: Query, failure_class: str
) -> dict[str, dict[str, int]]:
    """By menu, the number of episodes that each value would select, given the other menus."""
    found: tuple[Counter[Any], ...] = tuple(Counter() for _ in Facts._fields)
    for facts, n in counts.items():
        missed = [
            at for at, holds in enumerate(_match_menus(facts, query, failure_class)) if not holds
        ]
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


def count_by_env(counts: EpisodeCounts) -> dict[str, Counter[str]]:
    """Passed, failed and ungraded episodes per environment, without filters."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for facts, n in sorted(counts.items()):
        found[facts.env][facts.outcome] += n
    return found


def _match_menus(facts: Facts, query: Query, failure_class: str) -> tuple[bool, ...]:
    """Per menu, whether the episode matches."""
    kind, _, set_name = facts.where.partition(":")
    return (
        not query.env or facts.env == query.env,
        not query.outcome or facts.outcome == query.outcome,
        query.kind in ("", kind) and query.set_name in ("", set_name),
        query.step is None or facts.step == query.step,
        not failure_class or facts.failure_class == failure_class,
    )


class Viewer:
    """Answers the requests of the page for one run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._listing = Listing(run.trajectories)
        self._searches = Searches()
        self._classes = FailureClassifier()
        self._counted: tuple[tuple[int, int], EpisodeCounts] = ((-1, 0), Counter())

    def run(self, params: Params) -> dict[str, Any]:
        """The name of the run, and the menus under the given filters."""
        snapshot = self._listing.now()
        self._classes.classify_new(snapshot)
        # Read before counting: if it is 0, the counts include every episode.
        unclassified = self._classes.waiting
        counts = self._count(snapshot)
        try:
            query = Query.from_params(params)
        except QueryError:  # reported with the episodes; the menus still work
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
            "by_env": count_by_env(counts),
            "menus": build_menus(counts, query, params.get("class", "")),
        }

    def episodes(self, params: Params) -> dict[str, Any]:
        """One page of the matching episodes; with a search text, those found so far.

        `open_at` is the position of the episode that `open` names.
        """
        query = Query.from_params(params)
        revision = parse_int(params, "revision")
        snapshot = self._listing.now() if revision is None else self._listing.at(revision)
        text = params.get("text", "").strip()
        search = self._searches.get(snapshot, query, text) if text else None
        # Read before the finds: a finished search adds no more.
        progress = _progress(search) if search else None
        finds = dict(search.finds) if search else {}
        entries = sort_entries(finds, query.sort) if search else select_entries(snapshot, query)
        if wanted := params.get("class"):
            entries = [entry for entry in entries if self._classes.get(entry) == wanted]
        start = (parse_int(params, "page") or 0) * PAGE_ROWS
        return {
            "revision": snapshot.revision,
            "total": len(entries),
            "open_at": _position(snapshot, entries, params.get("open", "")),
            "rows": [
                self._row(entry, finds.get(entry, "") if finds else "")
                for entry in entries[start : start + PAGE_ROWS]
            ],
            "search": progress,
        }

    def episode(self, entry_id: str) -> dict[str, Any]:
        """One episode, and links to the other attempts at its task."""
        snapshot = self._listing.now()
        entry = snapshot.find(entry_id)
        trajectory = _load(entry)
        self._classes.classify(entry, trajectory)
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
        """Two episodes side by side, with their first difference."""
        snapshot = self._listing.now()
        left, right = (snapshot.find(params.get(side, "")) for side in ("a", "b"))
        return {
            "left": self._row(left),
            "right": self._row(right),
            **compare_episodes(_load(left), _load(right)),
        }

    def picture(self, entry_id: str, number: int) -> tuple[str, bytes]:
        """The media type and bytes of the n-th image of an episode."""
        shown = picture(_load(self._listing.now().find(entry_id)), number)
        if shown is None:
            raise RecordError(f"{entry_id!r} has no image {number} that a browser can display")
        return shown

    def close(self) -> None:
        self._searches.close()
        self._classes.close()

    @cached_property
    def _decode(self) -> Decode | None:
        return load_decoder(self._run.path)

    def _count(self, snapshot: Snapshot) -> EpisodeCounts:
        """Recount only if an episode or a failure class was added."""
        key = snapshot.revision, len(self._classes)
        if self._counted[0] != key:
            self._counted = key, count_episodes(snapshot, self._classes)
        return self._counted[1]

    def _row(self, entry: Entry, passage: str = "") -> dict[str, Any]:
        return row(entry, failure_class=self._classes.get(entry), passage=passage)


def _position(snapshot: Snapshot, entries: Sequence[Entry], entry_id: str) -> int | None:
    try:
        wanted = snapshot.find(entry_id)
    except RecordError:
        return None
    return next((at for at, entry in enumerate(entries) if entry is wanted), None)


def _around(same: Sequence[Entry], entry: Entry) -> Sequence[Entry]:
    """The nearest attempts if a task has more than are shown."""
    start = max(0, same.index(entry) - _ATTEMPTS_SHOWN // 2)
    return same[start : start + _ATTEMPTS_SHOWN]


def _progress(search: Search) -> dict[str, Any]:
    return {
        "running": search.running,
        "seen": search.seen,
        "total": search.total,
        "at_most": MAX_FINDS if search.full else None,
        "error": search.error,
    }
