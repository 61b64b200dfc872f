"""The experiment log: a run's entry in it, as Markdown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from skyfleet.analysis.advice import next_steps
from skyfleet.analysis.before_after import PLAIN_QUANTITIES, BehaviourChange, behaviour_changes
from skyfleet.analysis.failures import FailureClass, classify
from skyfleet.analysis.formatting import NOTHING, percent, shown, table
from skyfleet.analysis.learning_signal import EnvSignal, env_signals
from skyfleet.analysis.run_folder import RunFolder, read_entries, warn
from skyfleet.errors import TaskError
from skyfleet.evaluation.compare import Comparison, compare
from skyfleet.evaluation.table import comparison_table
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    run: RunFolder
    entries: Sequence[Entry]
    last_step: int
    comparisons: Sequence[Comparison]
    """Of the sets that were graded at two steps, the first with the last."""
    signals: Mapping[str, EnvSignal]
    changes: Mapping[str, Sequence[BehaviourChange]]
    """By set, of those played at two steps."""
    failures: Mapping[FailureClass, int]
    """At the last step of every set, the most frequent first."""
    examples: Mapping[FailureClass, str]
    """The id of one episode of each class."""
    left_out: Sequence[str]
    """What damaged files have lost, a sentence each."""


def gather_facts(run: RunFolder) -> RunFacts:
    """Evaluation episodes of the first and the last step are read, and none is kept.

    What a damaged file has lost is warned of and told, and is in no number that needs it read.
    """
    left_out: list[str] = []

    def damaged(error: RecordError) -> None:
        warn(error)
        left_out.append(str(error))

    entries = run.entries(on_damage=damaged)
    failures: Counter[FailureClass] = Counter()
    examples: dict[FailureClass, str] = {}
    changes = {}

    def last(of_step: Sequence[Entry]) -> Iterator[Trajectory]:
        for entry, trajectory in read_entries(of_step, on_damage=damaged):
            if (kind := classify(trajectory)) is not None:
                failures[kind] += 1
                examples.setdefault(kind, entry.id)
            yield trajectory

    for name, by_step in _evaluations(entries).items():
        first_step, last_step = min(by_step), max(by_step)
        after = last(by_step[last_step])
        if first_step < last_step:
            before = read_entries(by_step[first_step], on_damage=damaged)
            changes[name] = behaviour_changes((trajectory for _, trajectory in before), after)
        for _ in after:  # where nothing was compared, they are still to be classified
            pass
    return RunFacts(
        run=run,
        entries=entries,
        last_step=int(max((row["step"] for row in run.metrics()), default=0)),
        comparisons=_comparisons(run),
        signals=env_signals(entries),
        changes=changes,
        failures=dict(failures.most_common()),
        examples=examples,
        left_out=left_out,
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
    for by_step in run.reports().values():
        # A set with nothing graded at both steps is in no table; the others still are.
        with suppress(TaskError):
            if len(by_step) > 1:
                comparisons.append(compare(by_step[min(by_step)], by_step[max(by_step)]))
    return comparisons


_ONE_STEP = "Evaluated at no two steps."
_NOT_RECORDED = "Not recorded: the run was imported, and its dumps hold episodes only."


def experiment_entry(run: RunFolder) -> str:
    """Dataset, method, results, behaviour, signal, error patterns and what to do next."""
    facts = gather_facts(run)
    steps = next_steps(facts.signals, facts.comparisons, facts.changes, facts.failures)
    sections = {
        "Dataset": _dataset(facts),
        "Method": _NOT_RECORDED if run.imported else _method(facts),
        "Results": comparison_table(facts.comparisons) if facts.comparisons else _ONE_STEP,
        "Behaviour": _behaviour(facts.changes),
        "Training signal": _signal(facts.signals),
        "Error patterns": _errors(facts),
        "What to do next": "\n".join(f"- {sentence}" for sentence in steps)
        or "Nothing stands out.",
    }
    body = "\n\n".join(f"## {title}\n\n{text.strip()}" for title, text in sections.items())
    # Names in it come from data and from models.
    return "\n".join(map(shown, f"# {run.name}\n\n{body}\n".split("\n")))


def _dataset(facts: RunFacts) -> str:
    tasks: dict[tuple[str, str], set[str]] = defaultdict(set)
    episodes: Counter[tuple[str, str]] = Counter()
    for entry in facts.entries:
        place = entry.set_name or "training", entry.env_key
        tasks[place].add(entry.task_key)
        episodes[place] += 1
    rows = [(*place, f"{len(keys):,}", f"{episodes[place]:,}") for place, keys in tasks.items()]
    played = table(("set", "environment", "tasks", "episodes"), rows)
    told = [played, *(f"Left out: {sentence}." for sentence in facts.left_out)]
    if facts.run.imported:
        return "\n\n".join([*told, "What it was trained on is not recorded."])
    sources = [f"- `{source}`" for source in facts.run.config.data.train_data]
    return "\n\n".join([*told, "\n".join(["Trained on:", *sources])])


def _method(facts: RunFacts) -> str:
    trainer, generator = facts.run.config.trainer, facts.run.config.generator
    policy, algorithm = trainer.policy, trainer.algorithm
    kl = f"{algorithm.kl_loss_coef:g} x {algorithm.kl_estimator_type}"
    rows = [
        ("model", policy.model.path),
        ("steps", f"{facts.last_step}, after {trainer.warm_start.steps} of warm start"),
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
    for name, of_set in changes.items():
        cells: dict[str, list[str]] = defaultdict(list)
        for change in of_set:
            if change.quantity in PLAIN_QUANTITIES:
                cells[change.env_key].append(_change(change))
        rows += [(name, env_key, *of_env) for env_key, of_env in cells.items()]
    if not rows:
        return _ONE_STEP
    note = "Per episode. * the 95 % interval of the difference, resampling tasks, is without zero."
    return f"{table(('set', 'environment', *PLAIN_QUANTITIES), rows)}\n\n{note}"


def _change(change: BehaviourChange) -> str:
    if not change.measured:
        return NOTHING
    return f"{change.before:.2f} → {change.after:.2f}{' *' if change.clear else ''}"


def _signal(signals: Mapping[str, EnvSignal]) -> str:
    rows = [
        (
            env_key,
            f"{signal.over_run.variance_per_prompt:.4f}",
            percent(signal.over_run.steps_with_signal),
            percent(signal.over_run.mixed_groups),
            percent(signal.lately.mixed_groups),
            f"{signal.over_run.n_wasted:,} of {signal.over_run.n_attempts:,}",
            ", ".join(f"{size}: {percent(share)}" for size, share in signal.mixed_at.items()),
        )
        for env_key, signal in signals.items()
    ]
    header = (
        "environment",
        "variance per prompt, run",
        "steps with signal, run",
        "mixed groups, run",
        "mixed groups, lately",
        "wasted rollouts, run",
        "expected mixed by group size, lately",
    )
    if not rows:
        return "No training episode is kept."
    return f"{table(header, rows)}\n\nLately: the last quarter of the environment's steps."


def _errors(facts: RunFacts) -> str:
    total = sum(facts.failures.values())
    rows = [
        (kind.value, str(count), percent(count / total), f"`{facts.examples[kind]}`")
        for kind, count in facts.failures.items()
    ]
    return table(("class", "failures", "share", "one to read"), rows) if rows else "No failure."
