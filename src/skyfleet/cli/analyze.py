"""`skyfleet analyze`: behaviour and failure classes of a run's episodes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.analysis.formatting import (
    NOTHING,
    format_count,
    format_share,
    format_steps,
    percent,
    table,
)
from skyfleet.errors import ConfigError
from skyfleet.terminal import print, sanitize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skyfleet.analysis.behaviour import Behaviour, EnvBehaviour
    from skyfleet.trajectories.entry import Entry
    from skyfleet.trajectories.records import RecordError

TOOLS = 10
"""Rows per environment; --json has all."""
NAME_CHARACTERS = 40
_EXAMPLES = 3


def analyze_command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A folder that train wrote, its s3:// address, wandb://entity/project/run, or a .wandb file.",
        ),
    ],
    only: Annotated[
        str | None, typer.Option("--eval-set", help="One evaluation set, or train.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="One step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """Tool use, errors, endings, time and failure classes per environment."""
    import json
    from dataclasses import asdict

    from skyfleet.analysis.behaviour import summarize_behaviour
    from skyfleet.analysis.missing_episodes import find_missing_episodes, reject_without_episodes
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.tracking.console import ConsoleTracker
    from skyfleet.tracking.wandb_file import is_tracked_run

    if is_tracked_run(run):
        if only is not None or step is not None:
            raise ConfigError(
                f"{run}: --eval-set and --step select episodes, which W&B does not have"
            )
        from skyfleet.cli.analyze_tracked import analyze_tracked

        analyze_tracked(run, as_json=as_json)
        return
    folder = open_run(run)
    reject_without_episodes(folder)
    missing = find_missing_episodes(folder)
    damage: list[RecordError] = []
    entries = _chosen(folder.entries(on_damage=damage.append), only, step)
    # On stderr, because stdout may be parsed.
    console = ConsoleTracker(stream=sys.stderr)
    with console.progress("episodes", len(entries)) as advance:
        behaviour = summarize_behaviour(entries, on_read=advance, on_damage=damage.append)
    console.close()
    left_out = [sanitize(str(error)) for error in damage]
    if missing is not None:
        left_out.append(sanitize(missing.describe()))
    if as_json:
        result = {"run": folder.name, "left_out": left_out, **asdict(behaviour)}
        print(json.dumps(result, indent=2))
        return
    print(f"{sanitize(folder.name)}: {_headline(list(behaviour.by_env.values()), len(entries))}")
    print("".join(f"Left out: {reason}\n" for reason in left_out))
    print("\n\n".join(_sections(behaviour)))


def _headline(envs: Sequence[EnvBehaviour], n_entries: int) -> str:
    read = sum(env.n_episodes for env in envs)
    unknown = sum(env.n_unknown for env in envs)
    failed = read - unknown - sum(env.n_passed for env in envs)
    lost = f"; {n_entries - read:,} more could not be read" if n_entries > read else ""
    return f"{format_count(read, 'episode')}, {failed:,} failed, {unknown:,} unknown{lost}"


def _chosen(entries: Sequence[Entry], only: str | None, step: int | None) -> list[Entry]:
    """The selected entries; an unknown set or step is an error that lists the known ones."""
    sets = sorted({entry.set_name or "train" for entry in entries})
    if only is not None and only not in sets:
        raise ConfigError(f"--eval-set {only}: the run has {', '.join(sets) or 'no episodes yet'}")
    of_set = [entry for entry in entries if only in (None, entry.set_name or "train")]
    steps = sorted({entry.step for entry in of_set})
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: the run has {format_steps(steps)}")
    return [entry for entry in of_set if step in (None, entry.step)]


def _sections(behaviour: Behaviour) -> Iterator[str]:
    envs = list(behaviour.by_env.values())
    if not envs:
        return
    yield _behaviour_table(envs)
    if any(env.tool_calls for env in envs):
        yield table(("environment", "tool", "calls", "errors"), list(_tool_rows(envs)))
    if any(env.failures for env in envs):
        yield _failure_table(envs)
        yield "Open an example with `skyfleet view`."
    if shifts := list(_shift_rows(behaviour)):
        yield table(("set", "ended", "first step", "last step", "points", "95 %", ""), shifts)


def _behaviour_table(envs: Sequence[EnvBehaviour]) -> str:
    """Means over the episodes of the row."""
    header = (
        "environment",
        "episodes",
        "passed",
        "unknown",
        "turns",
        "calls",
        "errors",
        "malformed",
        "tokens",
        "engine s",
        "env s",
        "endings",
    )
    rows = [
        (
            env.env_key,
            str(env.n_episodes),
            format_share(env.n_passed, env.n_graded),
            str(env.n_unknown),
            _mean(env.turns, env),
            _mean(sum(env.tool_calls.values()), env),
            _mean(sum(env.tool_errors.values()), env),
            _mean(env.malformed_calls, env),
            _measured(env.sampled_tokens / env.n_episodes, digits=2),
            _measured(env.engine_seconds / env.n_episodes, digits=3),
            _measured(env.env_seconds / env.n_episodes, digits=3),
            ", ".join(
                f"{kind} {format_share(n, env.n_episodes)}" for kind, n in env.endings.items()
            ),
        )
        for env in envs
    ]
    return table(header, rows)


def _tool_rows(envs: Sequence[EnvBehaviour]) -> Iterator[tuple[str, ...]]:
    for env in envs:
        errors = env.tool_errors
        calls = [(name, n, errors.get(name, 0)) for name, n in env.tool_calls.items()]
        if others := calls[TOOLS:]:
            name = f"({format_count(len(others), 'other name')})"
            calls[TOOLS:] = [(name, sum(n for _, n, _ in others), sum(n for *_, n in others))]
        for name, n, wrong in calls:
            yield env.env_key, sanitize(name, at_most=NAME_CHARACTERS), str(n), str(wrong)


def _failure_table(envs: Sequence[EnvBehaviour]) -> str:
    from skyfleet.analysis.failure_class import FailureClass

    total = sum(sum(env.failures.values()) for env in envs)
    rows = []
    for kind in FailureClass:
        counts = [env.failures.get(kind, 0) for env in envs]
        if any(counts):
            examples = [env.examples[kind][0] for env in envs if kind in env.examples]
            share = format_share(sum(counts), total)
            shown = " ".join(examples[:_EXAMPLES])
            rows.append((kind.value, str(sum(counts)), share, *map(str, counts), shown))
    header = ("class", "episodes", "share", *(env.env_key for env in envs), "examples")
    return table(header, rows)


def _shift_rows(behaviour: Behaviour) -> Iterator[tuple[str, ...]]:
    """Shares of all episodes of the set: a failure class shrinks when more episodes pass."""
    for name, shifts in behaviour.shifts.items():
        steps = behaviour.by_set[name]
        for shift in shifts:
            low, high = shift.interval
            yield (
                name,
                shift.name,
                f"{min(steps)}: {percent(shift.before, digits=1)}",
                f"{max(steps)}: {percent(shift.after, digits=1)}",
                f"{100 * shift.difference:+.1f}",
                f"{100 * low:+.1f} to {100 * high:+.1f}",
                "" if shift.is_clear else "may be chance",
            )


def _mean(total: int, env: EnvBehaviour) -> str:
    return f"{total / env.n_episodes:.2f}"


def _measured(mean: float, *, digits: int) -> str:
    """Zero tokens or seconds means: not measured."""
    return f"{mean:.{digits}f}" if mean else NOTHING
