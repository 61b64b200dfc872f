"""`skyfleet analyze`: what a run's episodes did, and why those that failed did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.tables import table
from skyfleet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skyfleet.analysis.behaviour import Behaviour, EnvBehaviour
    from skyfleet.trajectories.entry import Entry

_TOOLS = 10
"""Rows an environment; --json has all."""
_EXAMPLES = 3
_NAME_CHARACTERS = 40


def analyze_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that train wrote.")],
    only: Annotated[str | None, typer.Option("--set", help="One evaluation set, or train.")] = None,
    step: Annotated[int | None, typer.Option(help="One step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """Tool use, errors, endings, time and classes of failure, environment by environment."""
    import json
    from dataclasses import asdict

    from skyfleet.analysis.behaviour import behaviour_of
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.tracking.console import ConsoleTracker

    folder = open_run(run)
    entries = _chosen(folder.entries(), only, step)
    # Not on stdout, which may be read by a program.
    console = ConsoleTracker(stream=sys.stderr)
    with console.progress("episodes", len(entries)) as advance:
        behaviour = behaviour_of(entries, on_read=advance)
    console.close()
    if as_json:
        print(json.dumps({"run": folder.name, **asdict(behaviour)}, indent=2))
        return
    failed = sum(sum(env.failures.values()) for env in behaviour.by_env.values())
    print(f"{folder.name}: {len(entries)} episodes, {failed} did not pass\n")
    print("\n\n".join(_sections(behaviour)))


def _chosen(entries: Sequence[Entry], only: str | None, step: int | None) -> list[Entry]:
    """A name or a step that the run does not have is answered with those it has."""
    sets = sorted({entry.set_name or "train" for entry in entries})
    if only is not None and only not in sets:
        raise ConfigError(f"--set {only}: the run has {', '.join(sets) or 'no episodes yet'}")
    of_set = [entry for entry in entries if only in (None, entry.set_name or "train")]
    steps = sorted({entry.step for entry in of_set})
    if step is not None and step not in steps:
        known = f"steps {steps[0]} to {steps[-1]}" if steps else "no episodes yet"
        raise ConfigError(f"--step {step}: the run has {known}")
    return [entry for entry in of_set if step in (None, entry.step)]


def _sections(behaviour: Behaviour) -> Iterator[str]:
    envs = list(behaviour.by_env.values())
    if not envs:
        return
    yield _behaviour_table(envs)
    yield _tool_table(envs)
    if any(env.failures for env in envs):
        yield _failure_table(envs)
        yield "Open an example with `skyfleet view`."
    if shifts := list(_shift_rows(behaviour)):
        yield table(("set", "class", "first step", "last step", "points"), shifts)


def _behaviour_table(envs: Sequence[EnvBehaviour]) -> str:
    """Means are over the episodes of the row."""
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
            _percent(env.n_passed, env.n_episodes),
            str(env.n_unknown),
            _mean(env.turns, env),
            _mean(sum(env.tool_calls.values()), env),
            _mean(sum(env.tool_errors.values()), env),
            _mean(env.malformed_calls, env),
            _mean(env.sampled_tokens, env),
            f"{env.engine_seconds / env.n_episodes:.3f}",
            f"{env.env_seconds / env.n_episodes:.3f}",
            ", ".join(f"{kind} {_percent(n, env.n_episodes)}" for kind, n in env.endings.items()),
        )
        for env in envs
    ]
    return table(header, rows)


def _tool_table(envs: Sequence[EnvBehaviour]) -> str:
    rows = [
        (env.env_key, _safe(name), str(calls), str(env.tool_errors.get(name, 0)))
        for env in envs
        for name, calls in list(env.tool_calls.items())[:_TOOLS]
    ]
    return table(("environment", "tool", "calls", "errors"), rows)


def _failure_table(envs: Sequence[EnvBehaviour]) -> str:
    from skyfleet.analysis.failure_class import FailureClass

    total = sum(sum(env.failures.values()) for env in envs)
    rows = []
    for kind in FailureClass:
        counts = [env.failures.get(kind, 0) for env in envs]
        if any(counts):
            examples = [env.examples[kind][0] for env in envs if kind in env.examples]
            share = _percent(sum(counts), total)
            shown = " ".join(examples[:_EXAMPLES])
            rows.append((kind.value, str(sum(counts)), share, *map(str, counts), shown))
    header = ("class", "episodes", "share", *(env.env_key for env in envs), "examples")
    return table(header, rows)


def _shift_rows(behaviour: Behaviour) -> Iterator[tuple[str, ...]]:
    """Shares of all episodes of the set, so that a class shrinks when more of them pass."""
    from skyfleet.analysis.failure_class import FailureClass

    for name, steps in behaviour.by_set.items():
        (first, before), *_ = steps.items()
        *_, (last, after) = steps.items()
        for kind in FailureClass if first != last else ():
            was = before.failures.get(kind, 0) / before.n_episodes
            now = after.failures.get(kind, 0) / after.n_episodes
            if was or now:
                yield (
                    name,
                    kind.value,
                    f"{first}: {was:.1%}",
                    f"{last}: {now:.1%}",
                    f"{100 * (now - was):+.1f}",
                )


def _safe(name: str) -> str:
    """A model may call a tool anything, also what would move a terminal's cursor."""
    return (name if name.isprintable() else repr(name))[:_NAME_CHARACTERS]


def _mean(total: int, env: EnvBehaviour) -> str:
    return f"{total / env.n_episodes:.2f}"


def _percent(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else "0.0%"
