"""The experiment log: a run's entry in it, written from what the run left behind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from skyfleet.analysis.advice import next_steps
from skyfleet.analysis.before_after import PLAIN_QUANTITIES, BehaviourChange, behaviour_changes
from skyfleet.analysis.failures import FailureClass, classify, failure_counts
from skyfleet.analysis.reading import read_entries
from skyfleet.analysis.run_folder import RunFolder
from skyfleet.analysis.signal import EnvSignal, env_signals, percent
from skyfleet.errors import TaskError
from skyfleet.evaluation.compare import Comparison, compare
from skyfleet.evaluation.table import comparison_table
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Set:
    """An evaluation set's episodes at its first and its last step."""

    name: str
    steps: tuple[int, int]
    before: Sequence[Trajectory]
    after: Sequence[tuple[Entry, Trajectory]]


def experiment_entry(run: RunFolder) -> str:
    """Dataset, method, results, behaviour, signal, error patterns and what to do next."""
    entries = run.entries()
    sets = _sets([entry for entry in entries if entry.kind == "eval"])
    comparisons = _comparisons(run)
    signals = env_signals(entries)
    failures = failure_counts(trajectory for of in sets for _, trajectory in of.after)
    changes = {
        of.name: behaviour_changes(of.before, (trajectory for _, trajectory in of.after))
        for of in sets
        if of.steps[0] < of.steps[1]
    }
    steps = next_steps(signals, comparisons, changes, failures)
    sections = {
        "Dataset": _dataset(run, entries),
        "Method": _method(run),
        "Results": comparison_table(comparisons) if comparisons else "Evaluated at no two steps.",
        "Behaviour": _behaviour(changes),
        "Training signal": _signal(signals),
        "Error patterns": _errors(sets, failures),
        "What to do next": "\n".join(f"- {sentence}" for sentence in steps)
        or "Nothing stands out.",
    }
    body = "\n\n".join(f"## {title}\n\n{text.strip()}" for title, text in sections.items())
    return f"# {run.name}\n\n{body}\n"


def _sets(entries: Sequence[Entry]) -> list[_Set]:
    by_set: dict[str, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        by_set[entry.set_name][entry.step].append(entry)
    return [
        _Set(
            name=name,
            steps=(min(by_step), max(by_step)),
            before=[trajectory for _, trajectory in read_entries(by_step[min(by_step)])],
            after=list(read_entries(by_step[max(by_step)])),
        )
        for name, by_step in by_set.items()
    ]


def _comparisons(run: RunFolder) -> list[Comparison]:
    comparisons = []
    for by_step in run.reports().values():
        # A set with nothing graded at both steps is in no table; the others still are.
        with suppress(TaskError):
            if len(by_step) > 1:
                comparisons.append(compare(by_step[min(by_step)], by_step[max(by_step)]))
    return comparisons


def _dataset(run: RunFolder, entries: Sequence[Entry]) -> str:
    tasks: dict[tuple[str, str], set[str]] = defaultdict(set)
    episodes: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        place = entry.set_name or "training", entry.env_key
        tasks[place].add(entry.task_key)
        episodes[place] += 1
    rows = [(*place, f"{len(keys):,}", f"{episodes[place]:,}") for place, keys in tasks.items()]
    sources = [f"- `{source}`" for source in run.config.data.train_data]
    return "\n".join(
        [_table(("set", "environment", "tasks", "episodes"), rows), "", "Trained on:", *sources]
    )


def _method(run: RunFolder) -> str:
    trainer, generator = run.config.trainer, run.config.generator
    policy, algorithm = trainer.policy, trainer.algorithm
    steps = max((row["step"] for row in run.metrics()), default=0)
    kl = f"{algorithm.kl_loss_coef:g} x {algorithm.kl_estimator_type}"
    rows = [
        ("model", policy.model.path),
        ("steps", f"{steps:.0f}, after {trainer.warm_start.steps} of warm start"),
        ("batch", f"{trainer.train_batch_size} tasks x {generator.n_samples_per_prompt} attempts"),
        ("advantage", algorithm.advantage_estimator),
        ("loss", f"{algorithm.policy_loss_type}, {algorithm.loss_reduction}"),
        ("KL loss", kl if algorithm.use_kl_loss else "none"),
        ("learning rate", f"{policy.optimizer_config.lr:g}"),
        ("episode", f"{generator.max_turns} turns, {generator.max_input_length} tokens of input"),
        ("temperature", f"{generator.sampling_params.temperature:g}"),
        ("seed", str(trainer.seed)),
    ]
    return _table(("setting", "value"), rows)


def _behaviour(changes: Mapping[str, Sequence[BehaviourChange]]) -> str:
    rows = []
    for name, of_set in changes.items():
        cells: dict[str, list[str]] = defaultdict(list)
        for change in of_set:
            if change.quantity in PLAIN_QUANTITIES:
                mark = " *" if change.clear else ""
                cells[change.env_key].append(f"{change.before:.2f} → {change.after:.2f}{mark}")
        rows += [(name, env_key, *of_env) for env_key, of_env in cells.items()]
    if not rows:
        return "Evaluated at no two steps."
    note = "Per episode. * the 95 % interval of the difference, resampling tasks, is without zero."
    return f"{_table(('set', 'environment', *PLAIN_QUANTITIES), rows)}\n\n{note}"


def _signal(signals: Mapping[str, EnvSignal]) -> str:
    rows = [
        (
            env_key,
            f"{signal.over_run.variance_per_prompt:.4f}",
            f"{percent(signal.over_run.steps_with_signal)}",
            f"{percent(signal.over_run.mixed_groups)}",
            f"{signal.over_run.n_wasted:,} of {signal.over_run.n_attempts:,}",
            ", ".join(f"{size}: {percent(share)}" for size, share in signal.mixed_at.items()),
        )
        for env_key, signal in signals.items()
    ]
    header = (
        "environment",
        "variance per prompt",
        "steps with signal",
        "mixed groups",
        "wasted rollouts",
        "expected mixed by group size",
    )
    return _table(header, rows) if rows else "No training episode is kept."


def _errors(sets: Sequence[_Set], failures: Mapping[FailureClass, int]) -> str:
    examples: dict[FailureClass, str] = {}
    for of in sets:
        for entry, trajectory in of.after:
            if (kind := classify(trajectory)) is not None:
                examples.setdefault(kind, entry.id)
    total = sum(failures.values())
    rows = [
        (kind.value, str(count), f"{percent(count / total)}", f"`{examples[kind]}`")
        for kind, count in failures.items()
    ]
    return _table(("class", "failures", "share", "one to read"), rows) if rows else "No failure."


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", r"\|") for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
