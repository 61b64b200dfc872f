"""The report page of one or several runs, in a single file.

The page loads nothing: style and script are inline, and its security policy allows only these two.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from skyfleet.analysis.html.behaviour import failure_section
from skyfleet.analysis.html.charts import slot_class
from skyfleet.analysis.html.curves import curve_section
from skyfleet.analysis.html.elements import Html, join, note, paragraphs, tag
from skyfleet.analysis.html.episodes import episode_section
from skyfleet.analysis.html.formatting import count, seconds
from skyfleet.analysis.html.page_data import (
    ReportRun,
    analyze_run,
    between_runs,
    read_runs,
    within_runs,
)
from skyfleet.analysis.html.run_sections import (
    next_section,
    phase_section,
    sentinel_section,
    settings_section,
    total_seconds,
)
from skyfleet.analysis.html.signals import distribution_section, signal_section
from skyfleet.analysis.html.verdicts import headline, verdict_section
from skyfleet.analysis.run_folder import RunFolder
from skyfleet.storage.local import write_atomically

_SECTIONS = {
    "next": "What to do next",
    "verdicts": "Verdicts",
    "curves": "Curves",
    "distributions": "Distributions",
    "signal": "Signal",
    "failures": "Failures",
    "time": "Time",
    "sentinels": "Sentinels",
    "settings": "Configuration",
    "episodes": "Episodes",
}


def write_report(runs: Sequence[RunFolder], output: Path) -> None:
    """Write one self-contained HTML file; replaces an existing file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    # A model may write half a surrogate pair, which UTF-8 cannot encode.
    write_atomically(output, build_report_page(runs).encode("utf-8", "backslashreplace"))


def build_report_page(folders: Sequence[RunFolder]) -> str:
    runs = read_runs(folders)
    heading = ", ".join(run.title for run in runs)
    return render_page(
        f"{heading} · skyfleet report", heading, _SECTIONS, _sections(runs), "skyfleet report"
    )


def render_page(
    title: str, heading: str, sections: Mapping[str, str], body: Html, command: str
) -> str:
    """A whole page: `sections` are the names in the navigation by their anchors, among them `verdicts`;
    `command` wrote the page."""
    style, script = _asset("style.css"), _asset("script.js")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", style),
    )
    whole = tag(
        "body",
        tag("a", "Skip to the verdicts", href="#verdicts", class_="skip"),
        tag(
            "header",
            tag("h1", heading),
            tag("button", "Theme", type="button", id="theme", hidden=True),
        ),
        _navigation(sections),
        tag("main", body),
        tag("footer", note("Written by ", tag("code", command), ".")),
        tag("script", script),
    )
    return f"<!doctype html>\n{tag('html', head, whole, lang='en')}\n"


def _sections(runs: Sequence[ReportRun]) -> Html:
    findings = [analyze_run(run) for run in runs]
    within, between = within_runs(runs), between_runs(runs)
    tables = [one for one in (*between, *within) if one.comparisons or one.notes]
    return join(
        _summary(runs),
        headline([one for one in between if one.comparisons] or within),
        next_section(findings, within),
        verdict_section(findings, tables),
        curve_section(runs),
        distribution_section(runs),
        signal_section(findings),
        failure_section(findings),
        phase_section(runs),
        sentinel_section(runs),
        settings_section(runs),
        episode_section(runs),
    )


def _navigation(sections: Mapping[str, str]) -> Html:
    links = [tag("li", tag("a", name, href=f"#{at}")) for at, name in sections.items()]
    return tag("nav", tag("ul", links), aria_label="Sections")


def _summary(runs: Sequence[ReportRun]) -> Html:
    """One line per run, with its colour if there are several."""
    lines = [
        tag(
            "li",
            None if run.alone else tag("span", class_=f"key {slot_class(run.slot)}"),
            None if run.alone else tag("strong", f"{run.title}: "),
            _describe_run(run),
        )
        for run in runs
    ]
    return join(
        tag("ul", lines, class_="summary"), [paragraphs(run.notes) for run in runs if run.notes]
    )


def _describe_run(run: ReportRun) -> str:
    unknown = sum(entry.success is None for entry in (*run.training, *run.evaluation))
    episodes = (
        f"{count(len(run.training))} training and {count(len(run.evaluation))} evaluation "
        f"episodes, {count(unknown)} ungraded"
    )
    if run.folder.imported:
        return f"{episodes}. Imported from dumps without configuration, tokens or times."
    model = run.folder.config.trainer.policy.model.path
    return f"{model}, {count(run.last_step)} steps, {episodes}, {seconds(total_seconds(run))}."


def _asset(name: str) -> Html:
    """Files of this package, which contain no text from a run."""
    return Html(files("skyfleet.analysis.html").joinpath(name).read_text(encoding="utf-8"))


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src {_hash_source(style)}; script-src {_hash_source(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash_source(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
