"""`skyfleet compare`: the difference of two evaluations, with interval and verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.errors import ConfigError, TaskError
from skyfleet.terminal import print

if TYPE_CHECKING:
    from skyfleet.evaluation.compare import Comparison
    from skyfleet.evaluation.report import EvalReport


def compare_command(
    before: Annotated[
        Path,
        typer.Argument(
            help="A report, a folder of reports, a run folder, or a YAML or CSV table of "
            "published rates."
        ),
    ],
    after: Annotated[
        Path | None,
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
    from skyfleet.evaluation.compare import Verdict
    from skyfleet.evaluation.table import conclude, evidence_table

    comparisons, notes = _comparisons(before, after, step)
    print(evidence_table(comparisons))
    print(*(conclude(comparison) for comparison in comparisons), *notes, sep="\n")
    verdicts = {
        change.verdict
        for comparison in comparisons
        for change in (comparison.overall, *comparison.by_env.values())
    }
    if fail_on_regression and Verdict.REGRESSED in verdicts:
        raise typer.Exit(1)


def _comparisons(
    before: Path, after: Path | None, step: int | None
) -> tuple[Sequence[Comparison], Sequence[str]]:
    """The comparisons, and one note per set that could not be compared."""
    from skyfleet.evaluation.compare import compare
    from skyfleet.evaluation.published import SUFFIXES, read_published
    from skyfleet.evaluation.report import match_reports

    for path in filter(None, (before, after)):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder; pass a report or a run folder")
    if before.suffix in SUFFIXES:
        if after is not None:
            raise ConfigError(f"{before} holds both columns; remove {after}")
        if step is not None:
            raise ConfigError(f"--step {step} needs a run folder, and {before} is a table")
        return [read_published(before)], [
            "The table does not list which tasks passed, so the columns are compared as unpaired samples "
            "(Fisher, Newcombe)."
        ]
    matched = match_reports(before, after, step=step)
    comparisons = []
    notes = [f"{name} exists on one side only." for name in matched.unmatched]
    for one, other in matched.pairs:
        try:
            comparisons.append(compare(one, other))
        except TaskError as error:  # the other sets still count
            notes.append(f"{error}.")
            continue
        notes += _cautions(one, other, comparisons[-1])
    if not comparisons:
        raise TaskError(notes[-1].removesuffix("."))
    left_out = sum(comparison.overall.n_left_out for comparison in comparisons)
    if left_out:
        notes.append(f"Excluded, because they are not graded on both sides: {left_out} tasks.")
    return comparisons, notes


def _cautions(before: EvalReport, after: EvalReport, comparison: Comparison) -> Iterator[str]:
    """Other differences between the two evaluations than the policy."""
    from skyfleet.evaluation.agent_info import differences

    if before.agent_info and after.agent_info:
        for difference in differences(before.agent_info, after.agent_info):
            yield f"{comparison.name}: {difference}."
    if uneven := comparison.overall.n_uneven:
        yield (
            f"{comparison.name}: {uneven} of {comparison.overall.n_tasks} tasks have more attempts "
            "on one side, and the test uses a random subset of them; evaluate both sides with "
            "the same generator.eval_n_samples_per_prompt to use all."
        )
