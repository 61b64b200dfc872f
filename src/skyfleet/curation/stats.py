"""Statistics of a set of tasks by env, as table rows and as HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from skyfleet.tasks.prepare import normalize_words
from skyfleet.tasks.task import Task

HEADER = (
    "env",
    "tasks",
    "unique prompts",
    "env_variables",
    "difficulty",
    "calls",
    "prompt words",
    "tools used",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    low: int
    middle: float
    high: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread:
        return cls(low=min(values), middle=median(values), high=max(values))

    def __str__(self) -> str:
        return f"{self.low} / {self.middle:g} / {self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStats:
    env_key: str
    n_tasks: int
    n_prompts: int
    n_with_variables: int
    """Tasks with env_variables, such as CURRENT_DATE and LOGGED_IN_USER."""
    difficulties: tuple[tuple[int | None, int], ...]
    calls: Spread
    """Number of calls per reference solution."""
    prompt_words: Spread
    tools: tuple[tuple[str, int], ...]
    """Tool and number of tasks whose reference calls it, the most used first."""


def compute_stats(tasks: Iterable[Task]) -> list[EnvStats]:
    by_env: dict[str, list[Task]] = {}
    for task in tasks:
        by_env.setdefault(task.env_key, []).append(task)
    return [_compute_env_stats(env_key, rows) for env_key, rows in sorted(by_env.items())]


def format_stats(stats: Iterable[EnvStats]) -> list[tuple[str, ...]]:
    """Format one row per env, in the columns of HEADER."""
    return [
        (
            one.env_key,
            str(one.n_tasks),
            str(one.n_prompts),
            _percent(one.n_with_variables, one.n_tasks),
            ", ".join(
                f"{'none' if level is None else level}: {n}" for level, n in one.difficulties
            ),
            str(one.calls),
            str(one.prompt_words),
            ", ".join(f"{tool} {n}" for tool, n in one.tools),
        )
        for one in stats
    ]


def describe_variables(stats: Iterable[EnvStats]) -> str:
    """`rows with env_variables: 95 % (3,311 of 3,485)`."""
    counts = [(one.n_with_variables, one.n_tasks) for one in stats]
    given, total = (sum(column) for column in zip(*counts, strict=True))
    return f"rows with env_variables: {_percent(given, total)} ({given:,} of {total:,})"


def _percent(part: int, whole: int) -> str:
    """Rounded towards the middle: 0 % and 100 % mean none and all."""
    percent = round(100 * part / whole)
    if 0 < part < whole:
        percent = min(99, max(1, percent))
    return f"{percent} %"


def render_stats_html(title: str, stats: Sequence[EnvStats]) -> str:
    """Render an HTML section with one table, without script or style."""
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADER)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in format_stats(stats)
    )
    return (
        f"<section>\n<h2>{escape(title)}</h2>\n<table>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>\n"
        f"<p>{escape(describe_variables(stats).capitalize())}. Calls and words: fewest, median, most. "
        "Tools: how many tasks call them.</p>\n"
        "</section>\n"
    )


def _compute_env_stats(env_key: str, tasks: Sequence[Task]) -> EnvStats:
    tools = Counter(name for task in tasks for name in {call.name for call in task.solution})
    difficulties = Counter(task.difficulty for task in tasks)
    return EnvStats(
        env_key=env_key,
        n_tasks=len(tasks),
        n_prompts=len({normalize_words(task.prompt) for task in tasks}),
        n_with_variables=sum(bool(task.env_variables) for task in tasks),
        difficulties=tuple(
            sorted(difficulties.items(), key=lambda pair: -1 if pair[0] is None else pair[0])
        ),
        calls=Spread.of([len(task.solution) for task in tasks]),
        prompt_words=Spread.of([len(task.prompt.split()) for task in tasks]),
        tools=tuple(sorted(tools.items(), key=lambda pair: (-pair[1], pair[0]))),
    )
