"""`skyfleet compare`: the difference of two evaluations, with interval and verdict."""

from __future__ import annotations

from typing import Annotated

import typer

from skyfleet.errors import TaskError
from skyfleet.terminal import print


def compare_command(
    before: Annotated[
        str,
        typer.Argument(
            help="A report, a folder of reports, a run folder or its s3:// address, or a YAML or CSV table of "
            "published rates."
        ),
    ],
    after: Annotated[
        str | None,
        typer.Argument(
            help="The evaluation to compare with; a run folder alone compares its first and last."
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of a run folder; by default the last.")] = None,
    fail_on_regression: Annotated[
        bool, typer.Option("--fail-on-regression", help="Exit with code 1 if a set is REGRESSED.")
    ] = False,
) -> None:
    """Compare task by task: difference, interval, p-value, verdict and detectable effect."""
    from skyfleet.api.comparison import compare
    from skyfleet.evaluation.compare import Verdict
    from skyfleet.evaluation.table import conclude, evidence_table

    compared = compare(before, after, step=step)
    if not compared.sets:
        raise TaskError(compared.notes[-1].removesuffix("."))
    print(evidence_table(compared.sets))
    print(*map(conclude, compared.sets), *compared.notes, sep="\n")
    verdicts = {
        change.verdict
        for comparison in compared.sets
        for change in (comparison.overall, *comparison.by_env.values())
    }
    if fail_on_regression and Verdict.REGRESSED in verdicts:
        raise typer.Exit(1)
