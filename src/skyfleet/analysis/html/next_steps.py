"""Next steps: what got worse, what to train on and what to read, before the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from skyfleet.analysis.advice import next_steps
from skyfleet.analysis.html.blocks import note, section
from skyfleet.analysis.html.comparisons import Compared
from skyfleet.analysis.html.findings import Findings
from skyfleet.analysis.html.markup import Html, join, tag


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
