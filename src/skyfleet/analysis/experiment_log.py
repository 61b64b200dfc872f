"""Experiment log: a Markdown entry that summarises one run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from skyfleet.analysis.advice import suggest_next_steps
from skyfleet.analysis.before_after import PLAIN_QUANTITIES, BehaviourChange, compare_behaviour
from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.failures import classify
from skyfleet.analysis.formatting import NOTHING, percent, table
from skyfleet.analysis.learning_signal import EnvSignal, compute_signals
from skyfleet.analysis.missing_episodes import MissingEpisodes, find_missing_episodes
from skyfleet.analysis.run_folder import RunFolder, read_entries, warn
from skyfleet.errors import TaskError
from skyfleet.evaluation.compare import Comparison, compare
from skyfleet.evaluation.held_out import compare_held_out
from skyfleet.evaluation.table import comparison_table
from skyfleet.redaction import redact
from skyfleet.terminal import sanitize
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Trajectory

_ONE_STEP = "Not evaluated at two steps that can be compared."
_NOT_RECORDED = "Not recorded: the run was imported from dumps, which only contain episodes."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    run: RunFolder
    entries: Sequence[Entry]
    last_step: int
    comparisons: Sequence[Comparison]
    """First step with last, for the sets that were graded at two steps."""
    signals: Mapping[str, EnvSignal]
    changes: Mapping[str, Sequence[BehaviourChange]]
    """By set, for the sets that were evaluated at two steps."""
    failures: Mapping[FailureClass, int]
    """At the last step of every set, most frequent first."""
    examples: Mapping[FailureClass, str]
    """One episode id per class."""
    skipped: Sequence[str]
    """One sentence per damaged file."""
    missing: MissingEpisodes | None
    """Steps whose episodes are elsewhere."""


def summarize_run(run: RunFolder) -> RunSummary:
    """Read the evaluation episodes of the first and last step, without keeping them in memory.

    Damaged files are logged, listed in `skipped` and left out of the numbers that need them.
    """
    skipped: list[str] = []

    def skip(error: RecordError) -> None:
        warn(error)
        skipped.append(str(error))

    entries = run.entries(on_damage=skip)
    failures: Counter[FailureClass] = Counter()
    examples: dict[FailureClass, str] = {}
    changes = {}

    def read_last(step_entries: Sequence[Entry]) -> Iterator[Trajectory]:
        for entry, trajectory in read_entries(step_entries, on_damage=skip):
            if (kind := classify(trajectory)) is not None:
                failures[kind] += 1
                examples.setdefault(kind, entry.id)
            yield trajectory

    for name, by_step in _evaluations(entries).items():
        first_step, last_step = min(by_step), max(by_step)
        after = read_last(by_step[last_step])
        if first_step < last_step:
            before = read_entries(by_step[first_step], on_damage=skip)
            changes[name] = compare_behaviour((trajectory for _, trajectory in before), after)
        for _ in after:  # classify them also if nothing was compared
            pass
    return RunSummary(
        run=run,
        entries=entries,
        last_step=int(max((row["step"] for row in run.metrics()), default=0)),
        comparisons=_comparisons(run),
        signals=compute_signals(entries),
        changes=changes,
        failures=dict(failures.most_common()),
        examples=examples,
        skipped=skipped,
        missing=find_missing_episodes(run),
    )


def _evaluations(entries: Sequence[Entry]) -> dict[str, dict[int, list[Entry]]]:
    """By set, then by step."""
    sets: dict[str, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        if entry.kind == "eval":
            sets[entry.set_name][entry.step].append(entry)
    return sets


def _comparisons(run: RunFolder) -> list[Comparison]:
    comparisons = []
    pairs = [
        (by_step[min(by_step)], by_step[max(by_step)])
        for by_step in run.reports().values()
        if len(by_step) > 1
    ]
    for before, after in pairs:
        # A set without a task graded at both steps, or graded by different code, has no row.
        with suppress(TaskError):
            comparisons.append(compare(before, after))
    if (held_out := compare_held_out(pairs)) is not None:
        comparisons.append(held_out)
    return comparisons


def experiment_entry(run: RunFolder) -> str:
    """Dataset, method, results, behaviour, training signal, error patterns and next steps."""
    summary = summarize_run(run)
    steps = suggest_next_steps(
        summary.signals, summary.comparisons, summary.changes, summary.failures
    )
    sections = {
        "Dataset": _dataset(summary),
        "Method": _NOT_RECORDED if run.imported else _method(summary),
        "Results": comparison_table(summary.comparisons) if summary.comparisons else _ONE_STEP,
        "Behaviour": _behaviour(summary.changes),
        "Training signal": _signal(summary.signals),
        "Error patterns": _errors(summary),
        "What to do next": "\n".join(f"- {sentence}" for sentence in steps) or "No suggestions.",
    }
    body = "\n\n".join(f"## {title}\n\n{text.strip()}" for title, text in sections.items())
    # Names come from data and from models, so control characters are escaped.
    return "\n".join(map(sanitize, redact(f"# {run.name}\n\n{body}\n").split("\n")))


def _dataset(summary: RunSummary) -> str:
    tasks: dict[tuple[str, str], set[str]] = defaultdict(set)
    episodes: Counter[tuple[str, str]] = Counter()
    for entry in summary.entries:
        key = entry.set_name or "training", entry.env_key
        tasks[key].add(entry.task_key)
        episodes[key] += 1
    rows = [(*key, f"{len(keys):,}", f"{episodes[key]:,}") for key, keys in tasks.items()]
    counts = table(("set", "environment", "tasks", "episodes"), rows)
    parts = [counts, *(f"Skipped: {sentence}." for sentence in summary.skipped)]
    if summary.missing is not None:
        parts.append(f"Incomplete: {summary.missing.describe()}.")
    if summary.run.imported:
        return "\n\n".join([*parts, "The training data is not recorded."])
    sources = [f"- `{source}`" for source in summary.run.config.data.train_data]
    return "\n\n".join([*parts, "\n".join(["Trained on:", *sources])])


def _method(summary: RunSummary) -> str:
    trainer, generator = summary.run.config.trainer, summary.run.config.generator
    policy, algorithm = trainer.policy, trainer.algorithm
    kl = f"{algorithm.kl_loss_coef:g} x {algorithm.kl_estimator_type}"
    rows = [
        ("model", policy.model.path),
        ("steps", f"{summary.last_step}, after {trainer.warm_start.steps} of warm start"),
        ("batch", f"{trainer.train_batch_size} tasks x {generator.n_samples_per_prompt} attempts"),
        ("advantage", algorithm.advantage_estimator),
        ("loss", f"{algorithm.policy_loss_type}, {algorithm.loss_reduction}"),
        ("KL loss", kl if algorithm.use_kl_loss else "none"),
        ("learning rate", f"{policy.optimizer_config.lr:g}"),
        ("episode", f"{generator.max_turns} turns, {generator.max_input_length} tokens of input"),
        ("temperature", f"{generator.sampling_params.temperature:g}"),
        ("seed", str(trainer.seed)),
    ]
    return table(("setting", "value"), rows)


def _behaviour(changes: Mapping[str, Sequence[BehaviourChange]]) -> str:
    rows = []
    for name, in_set in changes.items():
        cells: dict[str, list[str]] = defaultdict(list)
        for change in in_set:
            if change.quantity in PLAIN_QUANTITIES:
                cells[change.env_key].append(_change(change))
        rows += [(name, env_key, *env_cells) for env_key, env_cells in cells.items()]
    if not rows:
        return _ONE_STEP
    note = "Per episode. *: the 95 % interval of the difference, resampling tasks, excludes zero."
    return f"{table(('set', 'environment', *PLAIN_QUANTITIES), rows)}\n\n{note}"


def _change(change: BehaviourChange) -> str:
    if not change.is_measured:
        return NOTHING
    return f"{change.before:.2f} → {change.after:.2f}{' *' if change.is_clear else ''}"


def _signal(signals: Mapping[str, EnvSignal]) -> str:
    rows = [
        (
            env_key,
            f"{signal.whole_run.variance_per_prompt:.4f}",
            percent(signal.whole_run.steps_with_signal),
            percent(signal.whole_run.mixed_groups),
            percent(signal.recent.mixed_groups),
            f"{signal.whole_run.n_wasted:,} of {signal.whole_run.n_attempts:,}",
            ", ".join(f"{size}: {percent(share)}" for size, share in signal.mixed_at.items()),
        )
        for env_key, signal in signals.items()
    ]
    header = (
        "environment",
        "variance per prompt, run",
        "steps with signal, run",
        "mixed groups, run",
        "mixed groups, recent",
        "wasted rollouts, run",
        "expected mixed by group size, recent",
    )
    if not rows:
        return "No training episodes are recorded."
    return f"{table(header, rows)}\n\nRecent: the last quarter of the environment's steps."


def _errors(summary: RunSummary) -> str:
    if not any(entry.kind == "eval" for entry in summary.entries):
        return "No evaluation episodes are recorded here."
    total = sum(summary.failures.values())
    rows = [
        (kind.value, str(count), percent(count / total), f"`{summary.examples[kind]}`")
        for kind, count in summary.failures.items()
    ]
    return table(("class", "failures", "share", "example"), rows) if rows else "No failures."
