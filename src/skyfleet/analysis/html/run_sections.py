"""Settings: how the runs were configured, and what their data was made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from skyfleet.analysis.advice import next_steps
from skyfleet.analysis.html.bars import share_cell
from skyfleet.analysis.html.charts import Point, Series, line_chart
from skyfleet.analysis.html.curves import run_legend, value_range
from skyfleet.analysis.html.elements import (
    Html,
    columns,
    fold,
    grid,
    join,
    note,
    section,
    table,
    tag,
)
from skyfleet.analysis.html.formatting import SECONDS, count, number, percent, seconds, written
from skyfleet.analysis.html.page_data import Compared, Findings, ShownRun
from skyfleet.config.explain import as_yaml, diff, flatten
from skyfleet.config.root import RunConfig
from skyfleet.errors import TaskError
from skyfleet.sentinels.constant_metrics import constant_metrics
from skyfleet.storage.store import beside, is_remote
from skyfleet.tasks.manifest import MANIFEST, Manifest, read_manifest


def next_section(findings: Sequence[Findings], within: Sequence[Compared]) -> Html:
    """`within` holds each run's own comparison."""
    parts = [_of_run(one, compared) for one, compared in zip(findings, within, strict=True)]
    return section("next", "What to do next", parts)


def _of_run(findings: Findings, compared: Compared) -> Html:
    lasts = [one.ends[-1] for one in findings.sets if one.ends]
    failures = Counter(
        failure for last in lasts for _, _, failure in last.episodes if failure is not None
    )
    sentences = next_steps(
        findings.signals, compared.comparisons, findings.changes, dict(failures.most_common())
    )
    return join(
        None if findings.run.alone else tag("h3", findings.run.title),
        tag("ul", [tag("li", _with_code(sentence)) for sentence in sentences], class_="next")
        if sentences
        else note("Nothing stands out."),
    )


def _with_code(sentence: str) -> Html:
    """What stands between backticks is code."""
    parts = sentence.split("`")
    return join(tag("code", part) if at % 2 else part for at, part in enumerate(parts))


_PREFIX = "timing/"
_MOST_POINTS = 60
_SMALL_SHARE = 0.01
"""A phase that takes less of the time has no chart."""


def phase_section(runs: Sequence[ShownRun]) -> Html:
    timed = [run for run in runs if run.timing]
    if not timed:
        return section("time", "Time", note("No times were recorded."))
    return section(
        "time",
        "Time",
        grid([_table(run) for run in timed], span=6 if len(timed) > 1 else 12),
        tag("h3", "Seconds a step"),
        run_legend(runs),
        grid(_charts(timed), span=3),
    )


def phase_seconds(run: ShownRun) -> dict[str, list[tuple[int, float]]]:
    """By phase, its steps and their seconds; the longest phase first."""
    phases: dict[str, list[tuple[int, float]]] = {}
    for row in run.timing:
        for key, value in row.items():
            if key.startswith(_PREFIX):
                phases.setdefault(key.removeprefix(_PREFIX), []).append((int(row["step"]), value))
    return dict(sorted(phases.items(), key=lambda item: -_total(item[1])))


def total_seconds(run: ShownRun) -> float:
    return sum(_total(rows) for rows in phase_seconds(run).values())


def _total(rows: Sequence[tuple[int, float]]) -> float:
    return sum(value for _, value in rows)


def _table(run: ShownRun) -> Html:
    phases, whole = phase_seconds(run), total_seconds(run)
    rows = [
        (
            phase,
            seconds(_total(rows)),
            percent(_total(rows) / whole if whole else 0.0),
            share_cell(_total(rows) / whole if whole else 0.0),
            count(len(rows)),
            seconds(median(value for _, value in rows)),
        )
        for phase, rows in phases.items()
    ]
    head = columns(*("Phase", "Total", "Share", "", "Times", "Median"), text=("Phase",), draw=("",))
    return table(f"{run.title}: {seconds(whole)} in measured phases", head, rows)


def _charts(runs: Sequence[ShownRun]) -> list[Html]:
    """Only what happens at many steps is a curve."""
    by_run = [(run, phase_seconds(run), total_seconds(run)) for run in runs]
    charts = []
    for name in dict.fromkeys(name for _, phases, _ in by_run for name in phases):
        series = [
            Series(label=run.mark, slot=run.slot, points=_thinned(phases.get(name, [])))
            for run, phases, whole in by_run
            if _total(phases.get(name, [])) > _SMALL_SHARE * whole
        ]
        if any(len(one.points) > 2 for one in series):
            charts.append(line_chart(name, series, y_range=value_range(series), unit=SECONDS))
    return charts


def _thinned(rows: Sequence[tuple[int, float]]) -> tuple[Point, ...]:
    """Medians of neighbours, so that a long run is still a short list."""
    size = -(-len(rows) // _MOST_POINTS) or 1
    chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
    return tuple(
        Point(step=chunk[-1][0], value=median(value for _, value in chunk)) for chunk in chunks
    )


_SENTINEL_PREFIX = "sentinel/"


def sentinel_section(runs: Sequence[ShownRun]) -> Html:
    shown = [part for run in runs for part in (_sentinels_of_run(run), *_still(run))]
    return section("sentinels", "Sentinels", shown)


def _still(run: ShownRun) -> list[Html]:
    told = () if run.folder.imported else constant_metrics(run.folder.config).items()
    return [note(f"{run.title}: {key} {why}.") for key, why in told]


def _sentinels_of_run(run: ShownRun) -> Html:
    seen: dict[str, list[float]] = {}
    for row in run.metrics:
        for key, value in row.items():
            if key.startswith(_SENTINEL_PREFIX):
                seen.setdefault(key.removeprefix(_SENTINEL_PREFIX), []).append(value)
    if not seen:
        return note(f"{run.title}: no sentinel recorded anything.")
    head = columns("Sentinel", "Steps", "Smallest", "Largest", "Last", text=("Sentinel",))
    rows = [
        (name, count(len(values)), number(min(values)), number(max(values)), number(values[-1]))
        for name, values in sorted(seen.items())
    ]
    return table(f"{run.title}: sentinels", head, rows)


_MADE = ("world:", "agentdojo:")
_HASH_LETTERS = 12


def settings_section(runs: Sequence[ShownRun]) -> Html:
    recorded = [run for run in runs if not run.folder.imported]
    return section(
        "settings",
        "Configuration and data",
        _between(recorded) if len(recorded) > 1 else None,
        [_settings_of_run(run) for run in recorded],
        [
            note(f"{run.title}: not recorded, it was imported.")
            for run in runs
            if run not in recorded
        ],
    )


def _between(runs: Sequence[ShownRun]) -> Html:
    flat = [flatten(run.folder.config) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [
        (key, *(written(one.get(key)) for one in flat))
        for key in keys
        if any(one.get(key) != flat[0].get(key) for one in flat)
    ]
    if not rows:
        return note("The runs have the same configuration.")
    names = [run.title for run in runs]
    return table("Where the runs differ", columns("Key", *names, value=("Key", *names)), rows)


def _settings_of_run(run: ShownRun) -> Html:
    config = run.folder.config
    changed = diff(RunConfig(), config)
    rows = [(key, written(ours), written(default)) for key, (default, ours) in changed.items()]
    head = columns("Key", "This run", "Default", value=("Key", "This run", "Default"))
    differences = table(f"{run.title}: what is not the default", head, rows)
    return join(
        fold(f"{run.title}: {len(rows)} keys that are not the default", differences),
        fold(f"{run.title}: every key", tag("pre", as_yaml(config), tabindex="0")),
        fold(f"{run.title}: data", list(_data(config))),
    )


def _data(config: RunConfig) -> Iterator[Html]:
    """What is known of each training source, without asking another machine."""
    if not config.data.train_data:
        yield note("data.train_data is empty.")
    for source in config.data.train_data:
        if source.startswith(_MADE):
            yield note(tag("code", source), " is made from its address and has no manifest.")
        elif is_remote(source):
            yield note(tag("code", source), " is on another machine; its manifest was not read.")
        else:
            yield _manifest_of(source)


def _manifest_of(source: str) -> Html:
    try:
        manifest = read_manifest(beside(source, MANIFEST))
    except (OSError, TaskError):
        return note(tag("code", source), f" has no {MANIFEST} that can be read from here.")
    head = columns("Environment", "Train", "Validation", text=("Environment",))
    rows = [
        (env_key, count(sides.get("train", 0)), count(sides.get("validation", 0)))
        for env_key, sides in manifest.counts.items()
    ]
    return join(table(f"Tasks beside {source}", head, rows), note(_origin(manifest)))


def _origin(manifest: Manifest) -> str:
    dropped = ", ".join(f"{n} {reason}" for reason, n in manifest.dropped.items()) or "none"
    files = ", ".join(f"{name} {sha[:_HASH_LETTERS]}" for name, sha in manifest.files.items())
    return (
        f"From {manifest.source} ({manifest.source_sha256[:_HASH_LETTERS]}), split by "
        f"{manifest.split_by}, skyfleet {manifest.skyfleet_version}. Rows left out: {dropped}. "
        f"Files: {files}."
    )
