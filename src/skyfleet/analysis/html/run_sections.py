"""Sections about the run: next steps, time per phase, sentinels, configuration and data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from skyfleet.analysis.advice import suggest_next_steps
from skyfleet.analysis.formatting import NOTHING
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
from skyfleet.analysis.html.formatting import SECONDS, count, format_value, number, percent, seconds
from skyfleet.analysis.html.page_data import ComparisonTable, ReportRun, RunFindings
from skyfleet.analysis.plan_comparison import compare_plan, format_interval, format_quantity
from skyfleet.analysis.run_plan import PLAN
from skyfleet.config.keys import diff, dump_yaml, flatten
from skyfleet.config.root import RunConfig
from skyfleet.errors import SkyfleetError, TaskError
from skyfleet.sentinels.constant_metrics import constant_metrics
from skyfleet.storage.store import is_remote, sibling_address
from skyfleet.tasks.manifest import MANIFEST, Manifest, read_manifest
from skyfleet.tasks.sources import is_file
from skyfleet.tracking.step_log import PHASE_NAMES

_TIMING_PREFIX = "timing/"
_MAX_POINTS = 60
_SMALL_SHARE = 0.01
"""Phases with a smaller share of the time have no chart."""
_SENTINEL_PREFIX = "sentinel/"
_HASH_CHARACTERS = 12


def next_section(findings: Sequence[RunFindings], within: Sequence[ComparisonTable]) -> Html:
    """`within` holds the comparison of each run with itself."""
    parts = [_next_steps(one, compared) for one, compared in zip(findings, within, strict=True)]
    return section("next", "What to do next", parts)


def _next_steps(findings: RunFindings, compared: ComparisonTable) -> Html:
    lasts = [one.ends[-1] for one in findings.sets if one.ends]
    failures = Counter(
        failure for last in lasts for _, _, failure in last.episodes if failure is not None
    )
    sentences = suggest_next_steps(
        findings.signals, compared.comparisons, findings.changes, dict(failures.most_common())
    )
    return join(
        None if findings.run.alone else tag("h3", findings.run.title),
        tag("ul", [tag("li", _with_code(sentence)) for sentence in sentences], class_="next")
        if sentences
        else note("No suggestions."),
    )


def _with_code(sentence: str) -> Html:
    """Format the text between backticks as code."""
    parts = sentence.split("`")
    return join(tag("code", part) if at % 2 else part for at, part in enumerate(parts))


def phase_section(runs: Sequence[ReportRun]) -> Html:
    timed = [run for run in runs if run.timing]
    if not timed:
        return section("time", "Time", note("No times are recorded."))
    return section(
        "time",
        "Time",
        grid([_phase_table(run) for run in timed], span=6 if len(timed) > 1 else 12),
        tag("h3", "Seconds per step"),
        run_legend(runs),
        grid(_phase_charts(timed), span=3),
        [_plan_table(run) for run in timed if (run.folder.path / PLAN).is_file()],
    )


def _plan_table(run: ReportRun) -> Html:
    """What `skyfleet plan` expected, beside what the run took."""
    try:
        compared = compare_plan(run.folder)
    except SkyfleetError as error:
        return note(f"{run.title}: the plan is not compared: {error}")
    head = columns(*("Quantity", "Plan", "95 % interval", "Run", "Plan - run"), text=("Quantity",))
    rows = [
        (
            row.name,
            format_quantity(row.planned.value, row.unit),
            format_interval(row.planned, row.unit),
            NOTHING if row.actual is None else format_quantity(row.actual, row.unit),
            NOTHING if row.difference is None else f"{100 * row.difference:+.0f} %",
        )
        for row in compared.rows
    ]
    return join(
        table(f"{run.title}: plan and reality", head, rows),
        note(" ".join([compared.summarize(), *compared.notes])),
    )


def phase_seconds(run: ReportRun) -> dict[str, list[tuple[int, float]]]:
    """By phase, the steps and their seconds; longest phase first.

    Runs of older versions have other names for two phases. The time of the whole step is left out,
    because the phases are parts of it.
    """
    phases: dict[str, list[tuple[int, float]]] = {}
    for row in run.timing:
        for key, value in row.items():
            name = key.removeprefix(_TIMING_PREFIX)
            if name not in (key, "step"):
                phase = PHASE_NAMES.get(name, name)
                phases.setdefault(phase, []).append((int(row["step"]), value))
    return dict(sorted(phases.items(), key=lambda item: -_total(item[1])))


def total_seconds(run: ReportRun) -> float:
    return sum(_total(rows) for rows in phase_seconds(run).values())


def _total(rows: Sequence[tuple[int, float]]) -> float:
    return sum(value for _, value in rows)


def _phase_table(run: ReportRun) -> Html:
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


def _phase_charts(runs: Sequence[ReportRun]) -> list[Html]:
    """One chart per phase that occurs in more than two steps."""
    by_run = [(run, phase_seconds(run), total_seconds(run)) for run in runs]
    charts = []
    for name in dict.fromkeys(name for _, phases, _ in by_run for name in phases):
        series = [
            Series(label=run.mark, slot=run.slot, points=_thin_out(phases.get(name, [])))
            for run, phases, whole in by_run
            if _total(phases.get(name, [])) > _SMALL_SHARE * whole
        ]
        if any(len(one.points) > 2 for one in series):
            charts.append(line_chart(name, series, y_range=value_range(series), unit=SECONDS))
    return charts


def _thin_out(rows: Sequence[tuple[int, float]]) -> tuple[Point, ...]:
    """Medians of neighbouring steps, so that a long run has few points."""
    size = -(-len(rows) // _MAX_POINTS) or 1
    chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
    return tuple(
        Point(step=chunk[-1][0], value=median(value for _, value in chunk)) for chunk in chunks
    )


def sentinel_section(runs: Sequence[ReportRun]) -> Html:
    parts = [part for run in runs for part in (_sentinel_table(run), *_constant_metric_notes(run))]
    return section("sentinels", "Sentinels", parts)


def _constant_metric_notes(run: ReportRun) -> list[Html]:
    constant = () if run.folder.imported else constant_metrics(run.folder.config).items()
    return [note(f"{run.title}: {key} {why}.") for key, why in constant]


def _sentinel_table(run: ReportRun) -> Html:
    recorded: dict[str, list[float]] = {}
    for row in run.metrics:
        for key, value in row.items():
            if key.startswith(_SENTINEL_PREFIX):
                recorded.setdefault(key.removeprefix(_SENTINEL_PREFIX), []).append(value)
    if not recorded:
        return note(f"{run.title}: no sentinels are recorded.")
    head = columns("Sentinel", "Steps", "Smallest", "Largest", "Last", text=("Sentinel",))
    rows = [
        (name, count(len(values)), number(min(values)), number(max(values)), number(values[-1]))
        for name, values in sorted(recorded.items())
    ]
    return table(f"{run.title}: sentinels", head, rows)


def settings_section(runs: Sequence[ReportRun]) -> Html:
    recorded = [run for run in runs if not run.folder.imported]
    return section(
        "settings",
        "Configuration and data",
        _config_differences(recorded) if len(recorded) > 1 else None,
        [_run_settings(run) for run in recorded],
        [
            note(f"{run.title}: not recorded, because the run was imported.")
            for run in runs
            if run not in recorded
        ],
    )


def _config_differences(runs: Sequence[ReportRun]) -> Html:
    flat = [flatten(run.folder.config) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [
        (key, *(format_value(one.get(key)) for one in flat))
        for key in keys
        if any(one.get(key) != flat[0].get(key) for one in flat)
    ]
    if not rows:
        return note("The runs have the same configuration.")
    names = [run.title for run in runs]
    return table(
        "Differences between the runs", columns("Key", *names, value=("Key", *names)), rows
    )


def _run_settings(run: ReportRun) -> Html:
    config = run.folder.config
    changed = diff(RunConfig(), config)
    rows = [
        (key, format_value(ours), format_value(default)) for key, (default, ours) in changed.items()
    ]
    head = columns("Key", "This run", "Default", value=("Key", "This run", "Default"))
    differences = table(f"{run.title}: keys with a value other than the default", head, rows)
    return join(
        fold(f"{run.title}: {len(rows)} keys with a value other than the default", differences),
        fold(f"{run.title}: all keys", tag("pre", dump_yaml(config), tabindex="0")),
        fold(f"{run.title}: data", list(_data(config))),
    )


def _data(config: RunConfig) -> Iterator[Html]:
    """The manifest of each training source that is on this machine."""
    if not config.data.train_data:
        yield note("data.train_data is empty.")
    for source in config.data.train_data:
        if not is_file(source):
            yield note(tag("code", source), " is generated and has no manifest.")
        elif is_remote(source):
            yield note(tag("code", source), " is remote; its manifest was not read.")
        else:
            yield _manifest_table(source)


def _manifest_table(source: str) -> Html:
    try:
        manifest = read_manifest(sibling_address(source, MANIFEST))
    except (OSError, TaskError):
        return note(tag("code", source), f" has no readable {MANIFEST}.")
    head = columns("Environment", "Train", "Validation", text=("Environment",))
    rows = [
        (env_key, count(sides.get("train", 0)), count(sides.get("validation", 0)))
        for env_key, sides in manifest.counts.items()
    ]
    return join(table(f"Tasks of {source}", head, rows), note(_origin(manifest)))


def _origin(manifest: Manifest) -> str:
    dropped = ", ".join(f"{n} {reason}" for reason, n in manifest.dropped.items()) or "none"
    files = ", ".join(f"{name} {sha[:_HASH_CHARACTERS]}" for name, sha in manifest.files.items())
    return (
        f"From {manifest.source} ({manifest.source_sha256[:_HASH_CHARACTERS]}), split by "
        f"{manifest.split_by}, skyfleet {manifest.skyfleet_version}. Dropped rows: {dropped}. "
        f"Files: {files}."
    )
