"""Evaluations and comparisons as objects that print and render."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from skyfleet.analysis.run_folder import open_run
from skyfleet.api.models import HasRunFolder
from skyfleet.api.tables import markdown_to_html
from skyfleet.errors import ConfigError, NothingGradedError, TaskError
from skyfleet.evaluation import compare as core
from skyfleet.evaluation.agent_info import differences
from skyfleet.evaluation.baselines import baseline_faults
from skyfleet.evaluation.evaluate import check_graded
from skyfleet.evaluation.held_out import compare_held_out
from skyfleet.evaluation.published import SUFFIXES as PUBLISHED_SUFFIXES
from skyfleet.evaluation.published import read_published
from skyfleet.evaluation.report import EvalReport, match_reports, read_reports, save_report
from skyfleet.evaluation.table import comparison_table, conclude, score_table
from skyfleet.storage.cache import find_cache_folder
from skyfleet.storage.local import make_folder, write_atomically
from skyfleet.storage.store import is_remote, read_bytes
from skyfleet.trajectories.trajectory import Group

Change = core.Change


class Evaluation:
    """How good a policy was on one set of tasks: pass@1, interval, and every task's outcome.

    >>> import skyfleet as sf
    >>> env = sf.ToolEnv(reward=lambda answer: float("4" in answer))
    >>> evaluation = sf.evaluate("null", env, [{"prompt": "What is 2 + 2?"}])
    >>> evaluation.success_rate, evaluation.n_tasks
    (0.0, 1)
    """

    def __init__(
        self,
        report: EvalReport,
        trajectories: Sequence[Any] = (),
        notes: Sequence[str] = (),
        groups: Sequence[Group] = (),
    ) -> None:
        self.report, self.notes = report, (*notes, *baseline_faults(report.baselines))
        self.trajectories = tuple(trajectories)
        """The episodes, where they are at hand."""
        self._groups = groups

    @property
    def name(self) -> str:
        return self.report.name

    @property
    def step(self) -> int:
        return self.report.step

    @property
    def n_tasks(self) -> int:
        """Tasks with a graded attempt."""
        return self.report.overall.n_tasks

    @property
    def success_rate(self) -> float | None:
        """pass@1; None if nothing could be graded."""
        return self.report.overall.success_rate

    @property
    def mean_reward(self) -> float | None:
        return self.report.overall.mean_reward

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the success rate."""
        return self.report.overall.interval

    @property
    def pass_at_k(self) -> dict[int, float]:
        return dict(self.report.overall.pass_at_k)

    @property
    def metrics(self) -> dict[str, float]:
        """The scores under the names of a run's main set, such as `eval/all/avg_score`."""
        return self.report.metrics()

    def require_grades(self) -> None:
        """Raise NothingGradedError if no attempt has a grade, which is not a score of zero."""
        check_graded({self.name: self._groups})
        if self.success_rate is None and self.report.outcomes:
            raise NothingGradedError(
                f"evaluation set {self.name}: no attempt could be graded, so there is no score; "
                "remove the cause, which its episodes name, and evaluate again"
            )

    def save(self, folder: str | Path) -> None:
        """Write the report where `sf.compare(folder, ...)` reads it."""
        save_report(Path(folder), self.report)

    def __str__(self) -> str:
        return "\n".join((score_table([self.report]), *self.notes)).rstrip()

    def __repr__(self) -> str:
        rate = "ungraded" if self.success_rate is None else f"pass@1 {self.success_rate:.3f}"
        return f"Evaluation({self.name!r}, step={self.step}, {self.n_tasks} tasks, {rate})"

    def _repr_html_(self) -> str:
        return markdown_to_html(str(self))


class Comparison(Sequence[core.Comparison]):
    """Two evaluations task by task: difference, interval and verdict per set and environment.

    >>> import skyfleet as sf
    >>> tasks = [{"prompt": f"Say {n}.", "number": n} for n in range(8)]
    >>> env = sf.ToolEnv(reward=lambda task, answer: float(str(task["number"]) in answer))
    >>> before, after = sf.evaluate("null", env, tasks), sf.evaluate("null", env, tasks)
    >>> sf.compare(before, after).verdict
    'FAILING'
    """

    def __init__(self, sets: Sequence[core.Comparison], notes: Sequence[str] = ()) -> None:
        self.sets, self.notes = tuple(sets), tuple(notes)

    @property
    def overall(self) -> Change:
        """The change on the first set."""
        if not self.sets:
            raise ConfigError(f"nothing was compared: {' '.join(self.notes)}")
        return self.sets[0].overall

    @property
    def verdict(self) -> str:
        """The first set's: IMPROVED, REGRESSED, SATURATED, FAILING, UNDERPOWERED or NO EVIDENCE."""
        return self.overall.verdict.value

    @property
    def difference(self) -> float:
        return self.overall.difference

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            found = [comparison for comparison in self.sets if comparison.name == index]
            if not found:
                names = ", ".join(comparison.name for comparison in self.sets)
                raise ConfigError(f"no evaluation set {index!r}; choose from {names or 'none'}")
            return found[0]
        return self.sets[index]

    def __len__(self) -> int:
        return len(self.sets)

    def __str__(self) -> str:
        return "\n".join(self._lines()).strip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return markdown_to_html(str(self))

    def _lines(self) -> Iterator[str]:
        if self.sets:
            yield comparison_table(self.sets)
            yield from (conclude(comparison) for comparison in self.sets)
        yield from self.notes


def compare(before: Any, after: Any = None, *, step: int | None = None) -> Comparison:
    """Compare two evaluations by task. Each is an `Evaluation`, a folder, a report, a run or its address.

    A run alone is its first evaluation against its last, or against that of `step`. A YAML or CSV
    table of published rates holds both sides.

    >>> import skyfleet as sf
    >>> env = sf.ToolEnv(reward=lambda answer: float("4" in answer))
    >>> evaluation = sf.evaluate("null", env, [{"prompt": "What is 2 + 2?"}])
    >>> sf.compare(evaluation, evaluation).difference
    0.0
    """
    one = _read_side(before, "before")
    if after is None:
        if not isinstance(one, Path):
            raise ConfigError("sf.compare(before, after): after is missing; pass two evaluations")
        own = getattr(before, "comparison", None)
        if step is None and isinstance(own, Comparison):
            return own
        return _compare_paths(one, None, step)
    other = _read_side(after, "after")
    if isinstance(one, Path):
        if isinstance(other, Path):
            return _compare_paths(one, other, step)
        one = _find_report(one, other.name, step)
    elif isinstance(other, Path):
        other = _find_report(other, one.name, step)
    elif step is not None:
        raise ConfigError(f"sf.compare(step={step}): neither is a run; leave step out")
    return compare_reports([(one, other)])


def compare_reports(
    pairs: Sequence[tuple[EvalReport, EvalReport]], notes: Sequence[str] = ()
) -> Comparison:
    """Compare each pair; one that has no graded task in common becomes a note."""
    sets, notes = [], list(notes)
    for before, after in pairs:
        try:
            sets.append(core.compare(before, after))
        except TaskError as error:  # the other sets still count
            notes.append(f"{error}.")
        else:
            notes += _find_other_differences(before, after, sets[-1])
    if (held_out := compare_held_out(pairs)) is not None:
        sets.append(held_out)
    changed = sum(comparison.overall.n_changed for comparison in sets)
    if left_out := sum(comparison.overall.n_left_out for comparison in sets) - changed:
        notes.append(f"Excluded, because they are not graded on both sides: {left_out} tasks.")
    if changed:
        notes.append(f"Excluded, because their content differs on both sides: {changed} tasks.")
    return Comparison(sets, notes)


def _compare_paths(before: Path, after: Path | None, step: int | None) -> Comparison:
    for path in filter(None, (before, after)):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder; pass a report or a run folder")
    if before.suffix in PUBLISHED_SUFFIXES:
        if after is not None:
            raise ConfigError(f"{before} holds both columns; remove {after}")
        if step is not None:
            raise ConfigError(f"step {step} needs a run folder, and {before} is a table")
        return Comparison(
            [read_published(before)],
            [
                "The table does not list which tasks passed, so the columns are compared as "
                "unpaired samples (Fisher, Newcombe)."
            ],
        )
    matched = match_reports(before, after, step=step)
    unmatched = [f"{name} exists on one side only." for name in matched.unmatched]
    return compare_reports(matched.pairs, unmatched)


def _find_other_differences(
    before: EvalReport, after: EvalReport, comparison: core.Comparison
) -> Iterator[str]:
    """Differences between the two evaluations that are not the policy's."""
    if before.agent_info and after.agent_info:
        for difference in differences(before.agent_info, after.agent_info):
            yield f"{comparison.name}: {difference}."
    codes = before.grading_code, after.grading_code
    if codes[0] and codes[1] and not codes[0].is_comparable(codes[1]):
        yield (
            f"{comparison.name}: graded under {codes[0].python} and {codes[1].python}, so whether "
            "the code that grades is the same is not known."
        )
    if uneven := comparison.overall.n_uneven:
        yield (
            f"{comparison.name}: {uneven} of {comparison.overall.n_tasks} tasks have more attempts "
            "on one side, and the test uses a random subset of them; evaluate both sides with "
            "the same generator.eval_n_samples_per_prompt to use all."
        )


def _read_side(given: Any, which: str) -> EvalReport | Path:
    if isinstance(given, Evaluation):
        return given.report
    if isinstance(given, str | Path):
        return _fetch(str(given)) if is_remote(given) else Path(given).expanduser()
    if isinstance(given, HasRunFolder):
        return given.run_folder
    if isinstance(given, EvalReport):
        return given
    raise ConfigError(
        f"sf.compare({which}={given!r:.60}): pass an evaluation of sf.evaluate, a report, a run or "
        "a folder"
    )


def _fetch(address: str) -> Path:
    """A copy of a report, or of a run."""
    if not address.endswith(".json"):
        return open_run(address).path
    path = find_cache_folder("reports", address) / address.rpartition("/")[2]
    make_folder(path.parent)
    write_atomically(path, read_bytes(address))
    return path


def _find_report(path: Path, name: str, step: int | None) -> EvalReport:
    """The report of the set `name`, or the only one."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; pass a report or a run folder")
    reports = read_reports(path, step=step)
    if name not in reports and len(reports) > 1:
        raise ConfigError(
            f"{path} has the sets {', '.join(sorted(reports))}, and the evaluation is of {name!r}; "
            "pass the name of one of these to sf.evaluate(name=...)"
        )
    return reports.get(name) or next(iter(reports.values()))
