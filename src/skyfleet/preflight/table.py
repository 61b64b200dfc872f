"""The table of a preflight, as text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from skyfleet.preflight.check import CheckResult, Outcome

_MIN_WIDTH = 40


def format_table(results: Sequence[CheckResult], *, width: int | None = None) -> str:
    """One row per check, failures with their remedies; then one sentence that counts them."""
    width = width or max(100, shutil.get_terminal_size().columns)
    names = max((len(result.name) for result in results), default=0)
    outcomes = max(len(outcome.value) for outcome in Outcome)
    indent = " " * (outcomes + 2 + names + 2)
    lines: list[str] = []
    for result in results:
        head = f"{result.outcome.value:{outcomes}}  {result.name:{names}}  "
        for sentence in result.detail.splitlines() or [""]:
            lines += textwrap.wrap(
                sentence,
                max(width, len(indent) + _MIN_WIDTH),
                initial_indent=head,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            ) or [head.rstrip()]
            head = indent
    return "\n".join([*lines, "", summarize(results)])


def summarize(results: Sequence[CheckResult]) -> str:
    counts = {one: sum(result.outcome is one for result in results) for one in Outcome}
    failed, skipped = counts[Outcome.FAILED], counts[Outcome.NOT_CHECKED]
    skips = f", {skipped} could not be checked because of them" if skipped else ""
    warned = counts[Outcome.WARNING]
    skips += f", {warned} {'is a warning' if warned == 1 else 'are warnings'}" if warned else ""
    if failed:
        return f"{failed} of {len(results)} checks failed{skips}."
    rest = f", {skipped} were not possible" if skipped else ""
    rest += f", {warned} {'is a warning' if warned == 1 else 'are warnings'}" if warned else ""
    return f"All {len(results) - skipped - warned} checks passed{rest}."
