"""Sentinels: what the checks that run beside training have recorded."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.analysis.html.blocks import columns, note, section, table
from skyfleet.analysis.html.markup import Html
from skyfleet.analysis.html.shown_run import ShownRun
from skyfleet.analysis.html.wording import count, number
from skyfleet.sentinels.constant_metrics import constant_metrics

_PREFIX = "sentinel/"


def sentinel_section(runs: Sequence[ShownRun]) -> Html:
    shown = [part for run in runs for part in (_of_run(run), *_still(run))]
    return section("sentinels", "Sentinels", shown)


def _still(run: ShownRun) -> list[Html]:
    told = () if run.folder.imported else constant_metrics(run.folder.config).items()
    return [note(f"{run.title}: {key} {why}.") for key, why in told]


def _of_run(run: ShownRun) -> Html:
    seen: dict[str, list[float]] = {}
    for row in run.metrics:
        for key, value in row.items():
            if key.startswith(_PREFIX):
                seen.setdefault(key.removeprefix(_PREFIX), []).append(value)
    if not seen:
        return note(f"{run.title}: no sentinel recorded anything.")
    head = columns("Sentinel", "Steps", "Smallest", "Largest", "Last", text=("Sentinel",))
    rows = [
        (name, count(len(values)), number(min(values)), number(max(values)), number(values[-1]))
        for name, values in sorted(seen.items())
    ]
    return table(f"{run.title}: sentinels", head, rows)
