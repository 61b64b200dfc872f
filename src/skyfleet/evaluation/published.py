"""Published rates: compare two columns of percentages without the results of single tasks.

Without knowing which task passed before and after, the columns are compared as independent samples:
Fisher's exact test and Newcombe's interval.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from skyfleet.errors import ConfigError
from skyfleet.evaluation.compare import Change, Comparison, correct_p_values
from skyfleet.metrics.intervals import newcombe
from skyfleet.metrics.significance import detectable_difference, fisher_exact, tasks_needed

SUFFIXES = (".yaml", ".yml", ".csv")


def _strip_percent_sign(text: str) -> str:
    return text.strip().removesuffix("%").rstrip() if isinstance(text, str) else text


# Decimal keeps the printed precision: 70.0 is more precise than 70.
Percent = Annotated[Decimal, BeforeValidator(_strip_percent_sign), Field(ge=0, le=100)]


class _Row(BaseModel):
    """One environment: `n` tasks, and the percentage that passed, as printed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str = Field(min_length=1)
    n: int = Field(ge=1)
    before_percent: Percent
    after_percent: Percent


_ROWS = TypeAdapter(list[_Row])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    n: int
    before: int
    after: int


def read_published(path: Path) -> Comparison:
    """Read rows of env, n, before_percent and after_percent from YAML or CSV; their sum is `all`."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            # BaseLoader keeps numbers as text, with their printed digits.
            read: object = (
                list(csv.DictReader(file))
                if path.suffix == ".csv"
                else yaml.load(file, Loader=yaml.BaseLoader)
            )
            rows = _ROWS.validate_python(read)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "table"
            raise ConfigError(
                f"{path}: {where}: {first['msg']}; write rows of env, n, before_percent and "
                "after_percent"
            ) from None
        except (yaml.YAMLError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path} is not a table: {' '.join(str(error).split())}") from None
    return compare_published(
        path.stem, {row.env: _counts(path, row) for row in _check_rows(path, rows)}
    )


def compare_published(name: str, counts: dict[str, _Counts]) -> Comparison:
    everything = _Counts(
        n=sum(one.n for one in counts.values()),
        before=sum(one.before for one in counts.values()),
        after=sum(one.after for one in counts.values()),
    )
    return Comparison(
        name=name,
        step_before=None,
        step_after=None,
        overall=_change(everything),
        by_env=correct_p_values({env_key: _change(one) for env_key, one in counts.items()}),
    )


def _check_rows(path: Path, rows: Sequence[_Row]) -> Sequence[_Row]:
    names = [row.env for row in rows]
    if not names:
        raise ConfigError(f"{path} has no rows; write env, n, before_percent and after_percent")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path}: env {twice[0]!r} appears twice; give each environment one row")
    return rows


def _counts(path: Path, row: _Row) -> _Counts:
    return _Counts(
        n=row.n,
        before=_count_passes(path, row, row.before_percent),
        after=_count_passes(path, row, row.after_percent),
    )


def _count_passes(path: Path, row: _Row, percent: Decimal) -> int:
    """The number of passes that rounds to `percent` at its printed precision."""
    passed = round(row.n * percent / 100)
    exponent = percent.as_tuple().exponent
    digit = Decimal(10) ** min(0, exponent if isinstance(exponent, int) else 0)
    exact = Decimal(100 * passed) / row.n
    if abs(exact - percent) > digit / 2:
        raise ConfigError(
            f"{path}: {row.env}: {percent} % of n={row.n} is not a whole number of passes "
            f"({passed} of {row.n} is {exact:.1f} %); correct n or the percentage"
        )
    return passed


def _change(counts: _Counts) -> Change:
    n = counts.n
    before, after = counts.before / n, counts.after / n
    difference = after - before
    # The expected share of tasks whose result differs between two independent samples.
    discordance = before * (1 - after) + after * (1 - before)
    p_value = fisher_exact(counts.before, counts.after, n)
    return Change(
        n_tasks=n,
        n_left_out=0,
        before=before,
        after=after,
        difference=difference,
        interval=newcombe(before, after, n),
        p_value=p_value,
        corrected_p_value=p_value,
        detectable=detectable_difference(n, discordance),
        tasks_needed=tasks_needed(difference, discordance) if difference else None,
    )
